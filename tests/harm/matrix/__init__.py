"""A generated product of what users do to a layer and what then reads it, run as is and patched.

A trial is a kind of layer (:mod:`.subject`), steps (:mod:`.states`, :mod:`.changes`) and a reader (:mod:`.readers`).
Each step does the same to the layer and, where it changes numbers, to the weight that the test keeps in plain torch;
a reader is judged against that weight alone. :mod:`.trials` generates the product, the slice and the random walks,
:mod:`.running` runs them in forks, :mod:`.judge` compares. ``python -m tests.harm.matrix`` runs everything.
"""
