"""The transport ``cuda_ipc``: memory of GPUs of several processes of one machine."""
