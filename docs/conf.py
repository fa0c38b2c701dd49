"""Sphinx settings of `make docs`: every page of the repository as it is, and a reference from the docstrings.

Sphinx is called with `--fail-on-warning`, and is nitpicky: a link, an anchor or a name that leads nowhere ends it.
"""

import eckart

project = "Eckart"
version = release = eckart.__version__
copyright = "the maintainers of Eckart; Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]

root_doc = "docs/index"
include_patterns = ["*.md", "*/README.md", "docs/**"]
exclude_patterns = [".*", "data/*/", "models/*/", "reports", "workspaces", "site", "build", "mlruns", "mlartifacts"]

# Headings have the same anchors as on GitHub. A link to a file that is not a page copies the file into the site.
myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]  # code with … for what is there already

# A name in single backticks in a docstring is a link if the reference has that name. Types of Eckart must lead
# somewhere; those of other packages would have to be looked up on the network.
default_role = "py:obj"
nitpicky = True
nitpick_ignore_regex = [("py:obj", ".*"), ("py:.*", r"(?!eckart).*")]

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

_BELOW = {
    "docs/index": {
        "Tutorials": ["docs/tutorials/*"],
        "How to": ["docs/how-to/*", "examples/README", "studies/README"],
        "Reference": ["docs/reference/*", "docs/reference/api/index", "data/README", "models/README"],
        "Explanation": ["docs/explanation/**"],
        "Results": ["docs/results/index", "docs/results/shipping", "docs/results/papers", "docs/results/benchmarks"],
        "The project": ["README", "CONTRIBUTING", "CHANGELOG", "docs/notes/*"],
    },
    "docs/results/index": {"Pages": ["docs/results/*"]},
}
"""The navigation: page → captions → the pages below it. A page that is not listed here ends the build, too."""


def _navigate(_app, page, content):
    """Add the navigation to a page. It is not in the pages themselves, so that they read the same on GitHub."""
    for caption, pages in _BELOW.get(page, {}).items():
        paths = "\n".join(f"/{path}" for path in pages)
        content[0] += f"\n\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {caption}\n\n{paths}\n```\n"


def _without_type(_app, what, _name, _object, _options, lines):
    """Keep napoleon from taking the words before a colon, in the docstring of a value, for its type."""
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]  # an empty comment


def _start(app, error):
    """Write index.html, with which browsers and servers begin. It leads to the first page, whose links are relative."""
    if not error:
        (app.outdir / "index.html").write_text('<meta http-equiv="refresh" content="0; url=docs/index.html">\n')


def setup(app):
    app.connect("source-read", _navigate)
    app.connect("autodoc-process-docstring", _without_type, priority=400)
    app.connect("build-finished", _start)
