"""An OpenCL device: discrete memory, queues and events through pyopencl (extra `opencl`).

Nothing here imports pyopencl before the device is asked for. Kernel text is not made here: a backend prints
it, `OpenCLDevice.build` compiles it and `OpenCLStream.launch` runs it.
"""
