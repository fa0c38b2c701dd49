"""Sphinx settings of `make docs`: every page of the repository as it is, and a reference from the docstrings.

Sphinx is called with `--fail-on-warning`, and is nitpicky: a link, an anchor or a name that leads nowhere ends it.
"""

import gc
import shutil
from pathlib import Path

from sphinx.util.matching import patfilter

import eckart

gc.disable()  # all pages' trees are kept to the end: looking through them took a third of the time

project = "Eckart"
version = release = eckart.__version__
copyright = "the maintainers of Eckart; Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]

root_doc = "docs/index"
include_patterns = ["*.md", "*/README.md", "docs/**"]
exclude_patterns = [".*", "data/*/", "models/*/", "reports", "workspaces", "site", "build", "mlruns", "mlartifacts"]

# Headings have the same anchors as on GitHub. A link to a file that is not a page copies the file into the site.
myst_heading_anchors = 4
smartquotes = False  # which would make one dash of two, in --option
suppress_warnings = ["misc.highlighting_failure"]  # code with … for what is there already

# A name in single backticks in a docstring is a link if the reference has that name. Types of Eckart must lead
# somewhere; those of other packages would have to be looked up on the network.
default_role = "py:obj"
nitpicky = True
nitpick_ignore_regex = [("py:obj", ".*"), ("py:.*", r"(?!eckart).*"), ("py:class", r"eckart\.model\.experts\.Module")]

autodoc_default_options = {"exclude-members": "model_config"}
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 100
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = "Eckart"
html_copy_source = False

# The button of a code block copies the commands without their prompts and without what they print.
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

# `make links` asks the network for each address. These are on the reader's own machine.
linkcheck_ignore = [r"https?://(localhost|127\.0\.0\.1|10\.)"]

_BELOW = {
    "docs/index": {
        "Tutorials": ["docs/tutorials/your-model", "docs/tutorials/*", "examples/README"],
        "How-to": [
            *(
                f"docs/how-to/{name}"
                for name in ("your-data", "choose-a-size", "export", "serve", "nightly", "promote")
            ),
            *(f"docs/how-to/{name}" for name in ("share-and-reproduce", "cluster", "big-models", "extend")),
            "docs/how-to/*",
            "studies/README",
        ],
        "Reference": [
            *(f"docs/reference/{name}" for name in ("cli", "params", "report", "tasks", "models", "files")),
            "docs/reference/*",
            "docs/reference/api/index",
        ],
        "Explanation": [
            "docs/explanation/how-it-works",
            "docs/explanation/methods/index",
            "docs/explanation/statistics",
            "docs/explanation/*",
        ],
        "Results": [
            "docs/results/index",
            "docs/results/claims",
            "docs/results/shipping",
            "docs/results/papers",
            "docs/results/benchmarks",
        ],
        "Development": ["CONTRIBUTING", "CHANGELOG", "docs/notes/*", "*", "*/README"],
    },
    "docs/explanation/methods/index": {"Methods": ["docs/explanation/methods/*"]},
    "docs/results/index": {"Studies": ["docs/results/*"]},
}
"""The navigation: page → captions → the pages below it. A page that is not listed here ends the build, too.

The first pattern that a page matches gives its place; what a pattern names and is not there is left out.
"""


def _navigate(app, page, content):
    """Add the navigation to a page. It is not in the pages themselves, so that they read the same on GitHub."""
    left = sorted(app.env.found_docs - {page, "docs/index"})
    if page != "docs/index":  # the only one with pages of several folders
        above = {name for patterns in _BELOW["docs/index"].values() for name in patterns}
        left = [name for name in left if name not in above]
    for caption, patterns in _BELOW.get(page, {}).items():
        below = []
        for pattern in patterns:
            below += patfilter(left, pattern)
            left = [name for name in left if name not in below]
        paths = "\n".join(f"/{path}" for path in below)
        content[0] += f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{paths}\n```\n"


def _without_type(_app, what, _name, _object, _options, lines):
    """Keep napoleon from taking the words before a colon, in the docstring of a value, for its type."""
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]  # an empty comment


def _start(app, error):
    """Write index.html, with which browsers and servers begin. It leads to the first page, whose links are relative.

    Also add the drawings that pages name in HTML, of which Sphinx knows nothing.
    """
    if not error and app.builder.format == "html":
        images = Path(app.srcdir, "docs/images")
        if images.is_dir():
            shutil.copytree(images, app.outdir / "docs/images", dirs_exist_ok=True)
        (app.outdir / "index.html").write_text('<meta http-equiv="refresh" content="0; url=docs/index.html">\n')


_navigation = {}


def _once_for_each_folder(app, page, _template, context, doctree):
    """Make the navigation beside the sources of modules once for each folder: no more than its links would differ."""
    if doctree is None and "toctree" in context:
        folder, make = page.rpartition("/")[0], context["toctree"]
        context["toctree"] = lambda **options: (
            _navigation.get(folder) or _navigation.setdefault(folder, make(**options))
        )


def setup(app):
    app.connect("html-page-context", _once_for_each_folder, priority=400)  # before the theme's
    app.connect("source-read", _navigate)
    app.connect("autodoc-process-docstring", _without_type, priority=400)
    app.connect("build-finished", _start)
