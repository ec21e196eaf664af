"""Fair timings of the dot product attention against the peers installed: what ``attnspan bench`` runs.

`cases` lists what is compared, `sides` builds both sides of a case, `measure` times them in turn and
checks that they agree, `memory` measures a fresh process, and `report` writes down what was found.
"""
