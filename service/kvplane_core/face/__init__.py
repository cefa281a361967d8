"""What the product uses of the allocator, whichever core decides.

interface   `ReplicaCore`: what a core can do, with views that only read
common      what both cores do alike
loader      makes a core: the compiled one where it is installed, else the specification
native      the Python side of the compiled core
state       the image of a replica; `inspect` and `counters` read it
reasons     why a step is refused, and the text of each reason
setup       checks a spec, and derives what it leaves out
hit_rules   what a hit needs of each kind of group, over columns of keys

The other modules are types and columns of questions and answers.
"""
