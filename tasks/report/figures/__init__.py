"""The papers' figures, from the results and models of a study: what is shown, and how it is drawn."""
