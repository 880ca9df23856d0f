"""Whether the patches do harm: a catalogue of programs that have nothing to do with any patch.

Each program is what somebody writes around a quantized layer, five to fifteen lines with one idea. It runs
unpatched, with all patches, and with each patch alone whose code it reaches, and :mod:`.rule` compares:

=============== =======================================================
unpatched       allowed patched
=============== =======================================================
right           right, the same bits where the path was healthy
wrong, silently right, or a clear error
an error        right, or an error at least as clear; no wrong number
=============== =======================================================

"Right" is what the program computes itself from the dequantized or the unquantized weights.

- :mod:`.checks`, :mod:`.rule`: what a program shows, and the judge of it.
- :mod:`.catalogue`, :mod:`.layers`, :mod:`.programs`: the programs, and the layers that they are given.
- :mod:`.runner`, :mod:`.reach`, :mod:`.verdicts`: running them, and which patches a program reaches.
- :mod:`.share`: which release runs what compiles with one patch alone.
- :mod:`.elsewhere`: another process, without the plugin, that reads what a program has saved.
- :mod:`.known`: the programs that today's patches fail, why, and how an entry is taken out.
- :mod:`.sequences`: random sequences of operations on one layer, under the same rule.
- ``test_planted``: patches that do harm on purpose, and are found.

A new patch is judged with no further work: the runs walk the registry. ``python -m tests.harm WORD`` shows what the
programs with WORD in their id do, unpatched and with each set of patches. A new program is a generator function in
:mod:`.programs`, under the decorator :func:`.catalogue.program`.
"""
