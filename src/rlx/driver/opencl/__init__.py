"""An OpenCL device: discrete memory, queues and events through pyopencl (extra `opencl`).

Nothing here imports pyopencl before the device is opened. Kernel text is not written here: a backend prints
it, `OpenCLDevice.build` compiles it and `OpenCLStream.launch` runs it.
"""
