"""SGLang without its compiled kernels, on a CPU. Python runs this file in each process whose path has this folder.

SGLang 0.5.23 serves on CPUs by torch alone: its layers have another form in plain torch. But it imports packages that
need CUDA, and HiCache expects pinned memory, streams and events. These are replaced here. No copy is: HiCache's own
transfers are compiled kernels, and without them only kvplan can move its pages.
"""

import importlib.abc
import importlib.machinery
import sys
import types

import torch

# Compiled kernels; and sounds, of which no wheel is for torch without CUDA.
ABSENT = ("sgl_kernel", "torchaudio")


class Anything(type):
    """A class that has all attributes and takes all arguments, so that a module that imports it can be loaded."""

    def __new__(cls, name):
        return super().__new__(cls, name, (), {"__init__": lambda self, *given, **more: None})

    def __init__(cls, name):
        super().__init__(name, (), {})

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name)


class Absent(types.ModuleType):
    """A module that has all names, and nothing behind them."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name)


class AbsentModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The finder and loader of absent packages."""

    def find_spec(self, name, path, target=None):
        del path, target
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in ABSENT else None

    def create_module(self, spec):
        return Absent(spec.name)

    def exec_module(self, module):
        """Leave the module as it is."""


class Stream:
    """A stream of the CPU, where work has ended when it is called."""

    def __init__(self, *given, **more):
        """Take what a stream of a GPU takes."""

    def synchronize(self):
        """Wait for nothing."""

    def wait_event(self, event):
        """Wait for nothing."""

    wait_stream = wait_event

    def record_event(self, event=None):
        return event or Event()

    def query(self):
        return True


class Event:
    """An event of the CPU, which has always happened."""

    def __init__(self, *given, **more):
        """Take what an event of a GPU takes."""

    def record(self, stream=None):
        """Note nothing."""

    wait = record

    def synchronize(self):
        """Wait for nothing."""

    def query(self):
        return True


class Runtime:
    """CUDA's registration of host memory, which a CPU does not need."""

    def cudaHostRegister(self, address, nbytes, flags):
        return 0

    def cudaHostUnregister(self, address):
        return 0


# PyPI's torchvision is built for CUDA. Its Python code needs the names of two of its operators.
operators = torch.library.Library("torchvision", "DEF")
for operator in ("nms", "qnms"):
    operators.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
sys.meta_path.append(AbsentModules())
torch.cpu.Stream, torch.cpu.Event = Stream, Event
torch.cpu.current_stream = lambda device=None: Stream()
torch.cuda.cudart = Runtime
