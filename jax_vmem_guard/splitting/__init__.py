"""Proven block splitting, one step a file (`docs/splitting.md` tells how the proof works).

    program    finds the kernels of a traced program, puts the split ones in their place
    options    what can be split, in how many parts, at what cost (cost)
    axes       grid axes, and new ones for dimensions the grid does not move along
    kernel     one kernel: windows -> proof -> entry -> emit -> check
    windows    what each operand's block index is made of, and what may be cut
    frames     the kernel's jaxpr as a tree in which every value has one definition
    proof      which values are needed, whole or in parts (needs); rules, rules_*, memory, chunks say what follows
    entry      nothing is carried from one step of the axis into the next
    emit       traces the split kernel
    check      compares it with the original (numbering, numbering_control, terms)
    versions   the JAX releases all this was tried on
"""
