"""The operations on pages: attention, state updates, writes of tokens, and copies of whole pages.

Their arguments are tensors in pages; `interface` has the types. A backend is used only after it passed trials on the
device at hand.

    interface       what a backend computes, and the types of its arguments
    checks          argument checks that all backends share
    columns         tensors of many integers in host memory, without numpy
    torch_ops       PyTorch: correct on every device, used if no other backend works
    triton_ops      Triton kernels
    cudnn_ops       rows with many queries by cuDNN; everything else by Triton
    trials          small cases whose results decide whether a backend is used
    proof           runs the trials, in this process or in a child process
    select          chooses a backend by name, device and result of the trials
"""
