"""SGLang's cache in host memory and on a disk: a `UnifiedCacheLinker` on the slots of kvplane's tiers.

linker     what SGLang calls
contract   what this release of SGLang must offer
settings   the options, and the engines that are refused
pools      the rows of SGLang's memory that are one page
slots      pages of one pool by key, in host memory and on a disk
tiers      the pools together: look-up, saves on a thread, loads

SGLang is imported in `linker` and `contract` alone.
"""
