"""How are pages read and written? Attention, state updates, writes of tokens, and moves of whole pages.

Tensors over pages come in (`interface` has the types); results and changed pages go out. A backend is used only after
it passed the trials on the device at hand.

interface       what a backend computes, and the types of its arguments
checks          argument checks that all backends share
torch_ops       PyTorch: correct on every device, the last resort
triton_ops      Triton kernels
flashinfer_ops  attention by FlashInfer; the rest falls back to Triton, then PyTorch
trials          small cases whose results decide whether a backend is used
proof           runs the trials, in this process or in a child
select          chooses a backend by name, device and proof
"""
