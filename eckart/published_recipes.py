"""The built-in recipes, each as the settings that differ from the defaults of eckart/recipe.py.

`eckart.recipes()`, the pipeline and the reference page read them here. Under `recipes:`, params.yaml may change parts
of these recipes and add more recipes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Published(NamedTuple):
    """Built-in recipe: its title, the paper of its method, and its settings."""

    title: str
    paper: str | None
    """Link to the paper; None if there is none, or if the recipe as a whole is ours."""
    parts: Mapping[str, Any]
    """Settings that differ from the defaults; a bare word stands for `{"kind": word}`."""


PUBLISHED: Mapping[str, Published] = {
    "svd": Published("Truncated SVD (Eckart and Young 1936)", "https://doi.org/10.1007/BF02288367", {}),
    "fwsvd": Published("FWSVD (Hsu et al., ICLR 2022)", "https://arxiv.org/abs/2207.00112", {"weighting": "fisher"}),
    "iwsvd": Published("IWSVD, by Taylor scores", None, {"weighting": "taylor"}),
    "asvd": Published(
        "ASVD (Yuan et al. 2023), at uniform ranks",
        "https://arxiv.org/abs/2312.05821",
        {"weighting": "activation_scaling"},
    ),
    "drone": Published(
        "DRONE (Chen et al., NeurIPS 2021), at uniform ranks; the whitening of SVD-LLM",
        "https://neurips.cc/virtual/2021/poster/28707",
        {"weighting": "inputs"},
    ),
    "svd_llm_sequential": Published(
        "SVD-LLM's whitening, layer after layer (objective 3 of AA-SVD)",
        "https://arxiv.org/abs/2604.02119",
        {"weighting": "inputs", "sequential": {"anchor": 0.0}},
    ),
    "aa_svd": Published(
        "AA-SVD without refinement, at uniform ranks",
        "https://arxiv.org/abs/2604.02119",
        {"weighting": "inputs", "sequential": {"anchor": 1.0, "ridge": 1e-9}},
    ),
    "aa_svd_refined": Published(
        "AA-SVD (2026), at uniform ranks",
        "https://arxiv.org/abs/2604.02119",
        {
            "weighting": "inputs",
            "sequential": {"anchor": 1.0, "ridge": 1e-9, "refine": {"passes": 25, "batch_size": 32}},
        },
    ),
    "zs_svd": Published(
        "ZS-SVD, one shot (ICML 2026)",
        "https://arxiv.org/abs/2602.02848",
        {"weighting": "inputs", "ranks": "zero_sum"},
    ),
    "kfac_svd": Published(
        "KFAC-SVD (LEMS, ICML 2026), at uniform ranks",
        None,
        {"weighting": {"kind": "kfac", "shrinkage": 0.3, "input_shrinkage": 0.1}},
    ),
    "lems": Published(
        "LEMS (ICML 2026): KFAC-SVD with ranks by measured losses and depth",
        None,
        {"weighting": {"kind": "kfac", "shrinkage": 0.3, "input_shrinkage": 0.1}, "ranks": "calibrated"},
    ),
    "kfac": Published(
        "K-FAC weighting (as in KFAC-SVD, ICML 2026), waterfilled ranks (ours)",
        None,
        {"weighting": "kfac", "ranks": "waterfill"},
    ),
    "anchored": Published(
        "kfac, each layer corrected for the error of earlier ones (ours)",
        None,
        {"weighting": "kfac", "ranks": "waterfill", "sequential": {"anchor": 0.5}},
    ),
    "narrowed": Published(
        "anchored and pivoted; MLPs may lose neurons: the default for language models (ours)",
        None,
        {
            "weighting": {"kind": "kfac", "input_shrinkage": 0.01},
            "ranks": {"kind": "waterfill", "narrow": True},
            "storage": "pivoted",
            "sequential": {"anchor": 0.5, "sums": True},
        },
    ),
    "ars": Published(
        "ARS (Gao et al., NAACL 2024)",
        "https://aclanthology.org/2024.naacl-long.13/",
        {"weighting": "fisher", "ranks": "hypernetwork"},
    ),
    "drone_tolerance": Published(
        "DRONE with its own search of ranks, algorithm 2",
        "https://neurips.cc/virtual/2021/poster/28707",
        {"weighting": "inputs", "ranks": "tolerance"},
    ),
    "softlm": Published("SoftLM (Bhatnagar et al. 2024)", "https://arxiv.org/abs/2411.10543", {"ranks": "threshold"}),
    "lpaf": Published(
        "LPAF (Ren and Zhu, LREC-COLING 2024)",
        "https://arxiv.org/abs/2306.14152",
        {
            "source": "base",
            # (choice) ten epochs of 3,000 examples, at the rate of the original model's own training
            "shaping": {
                "kind": "pruning",
                "score": "first_order",
                "steps": 940,
                "batch_size": 32,
                "learning_rate": 1e-4,
                "remaining": [0.75, 0.5, 0.25, 0.1],
            },
            "weighting": "movement",
            "ranks": {"kind": "uniform", "by": "rank"},
            "recovery": "mixed_rank",
        },
    ),
    "lpaf_sensitivity": Published(
        "LPAF with other scores, pruning the original model for a few steps (ours)",
        None,
        {"shaping": "pruning", "weighting": "movement", "recovery": "mixed_rank"},
    ),
    "losparse": Published(
        "LoSparse (Li et al., ICML 2023)", "https://arxiv.org/abs/2306.11222", {"residual": "sparse_rows"}
    ),
    "movement_pruning": Published(
        "Movement pruning of rows (Sanh et al., NeurIPS 2020), a baseline of LoSparse",
        "https://arxiv.org/abs/2005.07683",
        {"residual": {"kind": "sparse_rows", "low_rank": 0.0, "score": "movement"}},
    ),
}
"""The built-in recipes by name."""
