"""KVLayout, the public class of layouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Self

from kvplan.base.numbers import number_ranges
from kvplan.base.process import cached_property
from kvplan.base.values import integer, optional_integer, other_case, quoted
from kvplan.errors import BlockIndexError, LayoutError
from kvplan.layout.build import build
from kvplan.layout.components import Built, Component, Geometry, Region
from kvplan.layout.kinds import sizes, words
from kvplan.layout.records import mapped, record_of
from kvplan.layout.slicing import Heads, joined_heads, merge, sliced
from kvplan.layout.tensors import Holding


class KVLayout:
    """The addresses of all bytes of a KV cache: a strided map from (layer, part, block, token, head).

    :meth:`from_tensors`, :meth:`from_spec`, :meth:`merge`, :func:`kvplan.allocate` and the backends' ``describe`` make
    layouts. A layout is immutable. Two layouts are equal if they hold the same bytes in the same order, even if their
    notations differ. An axis of extent 1 makes no difference.

    Attributes:
        built: the layout as plain data.
        components: one for each (layer, part), or for each of its heads if heads are separate allocations.
        regions: the allocations that hold the cache, in order of address.
        num_blocks: number of blocks.
        block_tokens: token slots per block; sub-blocks per block if no part has token slots.
        dtype: name of the element type.
        notation: text of the notation, in normal form.
        tensors: the tensors as they were given; None for a spec, dump or pickle.
        holdings: records of the tensors' memory, to check that the tensors still have it.

    >>> import numpy as np
    >>> layout = KVLayout.from_tensors("layer: block kv token head dim", [np.zeros((8, 2, 16, 4, 64), np.float16)] * 1)
    >>> layout.num_blocks, layout.block_tokens, layout.parts, layout.block_nbytes
    (8, 16, ('k', 'v'), 16384)
    """

    num_blocks: int
    block_tokens: int
    dtype: str
    notation: str

    def __init__(self, built: Built, *, tensors: Any = None) -> None:
        self.built = built
        self.components = built.components
        self._by_key: dict[tuple[int, str], list[Component]] = {}
        for component in built.components:
            self._by_key.setdefault((component.layer, component.part), []).append(component)
        self.regions: tuple[Region, ...] = built.regions
        self.num_blocks = built.num_blocks
        self.block_tokens = built.block_tokens
        self.dtype = built.dtype
        self.notation = built.notation
        self.tensors: Any = tensors
        self.reached: dict[int, Any] = {}  # by the context of a GPU that reaches the memory: see kvplan.cuda.reach
        self.holdings = tuple(r.held for r in self.regions if isinstance(r.held, Holding))

    def __copy__(self) -> Self:
        return self  # a layout stands for memory, which is not copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _loaded, (record_of(self.built),)

    @classmethod
    def from_tensors(
        cls,
        notation: str,
        tensors: Any,
        *,
        sizes: Mapping[str, int] | None = None,
        layer_start: int = 0,
        head_start: int = 0,
        part: str = "kv",
        seams: Sequence[int] = (),
        layers: Sequence[int] | None = None,
    ) -> KVLayout:
        """Return the layout of existing tensors, from their real strides.

        Args:
            notation: for example ``"layer: block kv token head dim"``; see :mod:`kvplan.layout.notation`.
            tensors: one tensor, or nested lists or tuples of tensors, as the left side of the notation says. A tensor
                is a torch tensor, a numpy array, or an object with the same members.
            sizes: extents in elements that the shapes do not give, by axis or factor (``{"token": 16}``).
            layer_start: global number of the first layer in the tensors.
            head_start: global number of the first KV head in the tensors.
            part: name of the content if the notation has no kv axis. With a kv axis, the parts are ``"k"`` and
                ``"v"``, or ``"k_scale"`` and ``"v_scale"`` for ``part="scale"``.
            seams: addresses that no descriptor may cross (boundaries between host registrations).
            layers: global number of every layer, if the numbers are not consecutive.

        Raises:
            NotationError: the notation does not parse.
            LayoutError: tensors do not fit the notation or each other, bytes overlap, or bytes lie outside memory.

        >>> import numpy as np
        >>> KVLayout.from_tensors("(block token) head dim", np.zeros((64, 2, 8), np.int8), sizes={"token": 16})
        KVLayout('(block token) head dim | block=4 token=16 head=2 dim=8 | int8 on cpu')
        """
        return cls(build(notation, tensors, sizes, layers, layer_start, head_start, part, seams), tensors=tensors)

    @classmethod
    def from_spec(cls, spec: str | Path | Mapping[str, Any]) -> KVLayout:
        """Return the layout that a spec or a dump describes. The addresses of a spec are made up.

        Args:
            spec: a ``.toml`` or ``.json`` file, or its content as a mapping. A dump of :meth:`save` has the engine's
                addresses. A spec has the keys ``notation`` and ``sizes`` (extents in elements). Optional keys are
                ``dtype``, ``strides`` (elements, in the order of the dims), ``address``, ``device``, ``part``,
                ``layer_start``, ``layers``, ``head_start`` and ``seams``. A list of specs under ``layouts`` is merged.

        Raises:
            NotationError: the notation does not parse.
            LayoutError: the file does not parse, a key is missing or unknown, or a value is wrong.

        >>> KVLayout.from_spec({"notation": "layer: block token dim", "dtype": "bf16",
        ...                     "sizes": {"layer": 61, "block": 100, "token": 64, "dim": 576}}).block_nbytes
        4497408
        """
        from kvplan.layout.spec import built_from_spec

        return cls(built_from_spec(spec))

    @classmethod
    def merge(cls, layouts: Sequence[KVLayout]) -> KVLayout:
        """Join layouts of separate tensors into one layout with more layers or with named extra parts.

        Args:
            layouts: layouts of equal num_blocks and block_tokens, on one device, that share no (layer, part) and no
                byte. An opaque part may be joined if its number of sub-blocks divides block_tokens.

        Raises:
            LayoutError: layouts differ in blocks, tokens or device; or two layouts hold the same part or bytes.

        >>> import numpy as np
        >>> kv = KVLayout.from_tensors("block token dim", np.zeros((4, 16, 64), np.int8), part="ckv")
        >>> pe = KVLayout.from_tensors("block token dim", np.zeros((4, 16, 8), np.int8), part="kpe")
        >>> KVLayout.merge([kv, pe]).parts
        ('ckv', 'kpe')
        """
        layouts = tuple(layouts) if isinstance(layouts, Iterable) else (layouts,)
        for k, layout in enumerate(layouts):
            if not isinstance(layout, KVLayout):
                raise LayoutError(f"merge takes layouts; number {k} is a {type(layout).__name__}")
        return cls(merge([layout.built for layout in layouts]), tensors=[layout.tensors for layout in layouts])

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Global numbers of the layers, ascending."""
        return tuple(sorted({c.layer for c in self.components}))

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts, in the order in which they were given."""
        return self.built.parts

    @cached_property
    def heads(self) -> Heads:
        """Global numbers of the KV heads of all layers: a range; a tuple if some number between them is not held."""
        forms = [c.form for c in self.components if c.form.headed] or [c.form for c in self.components]
        return joined_heads(form.heads for form in forms)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Extent of each axis of the notation, in elements for ``dim``; no axis on which layers or parts differ."""
        return sizes(self.built)

    @cached_property
    def block_nbytes(self) -> int:
        """Bytes of content per block, over all layers and parts, without padding."""
        return self.built.block_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of content in all blocks, without padding."""
        return self.num_blocks * self.block_nbytes

    @property
    def device(self) -> str:
        """The device that all regions are on."""
        return self.built.device

    @property
    def opaque(self) -> bool:
        """Whether no part has token slots; then blocks move whole."""
        return self.built.opaque

    @cached_property
    def addresses(self) -> Literal["memory", "dump", "spec"]:
        """Source of the addresses: ``"memory"`` of this process, ``"dump"`` of another process, or ``"spec"``, made up.

        A layout from a pickle has ``"dump"``, or ``"memory"`` if all of it lies in shared pools that are in use.

        >>> KVLayout.from_spec({"notation": "block dim", "sizes": {"block": 4, "dim": 8}}).addresses
        'spec'
        """
        if any(region.virtual for region in self.regions):
            return "spec"
        return "dump" if any(region.recorded for region in self.regions) else "memory"

    @property
    def virtual(self) -> bool:
        """Whether the addresses are made up."""
        return self.addresses == "spec"

    @cached_property
    def writable(self) -> bool:
        """Whether every region is writable."""
        return all(region.writable for region in self.regions)

    @cached_property
    def seams(self) -> tuple[int, ...]:
        """Addresses that no descriptor may cross, ascending."""
        return tuple(sorted({seam for region in self.regions for seam in region.seams}))

    @cached_property
    def geometry(self) -> Geometry:
        """The data of the layout that the compiler reads."""
        return Geometry(self.components, self.num_blocks, self.block_tokens)

    def component(self, layer: int, part: str, head: int | None = None) -> Component:
        """Return the component of one (layer, part), or of one head if heads are separate allocations."""
        layer, head = integer("layer", layer), optional_integer("head", head)
        found = self._by_key.get((layer, part)) if isinstance(part, str) else None
        if found is None:
            hint = other_case(part, self.parts) if isinstance(part, str) else ""
            known = f"layers {number_ranges(self.layers)}, parts {self.parts}"
            raise LayoutError(f"no layer {layer} {quoted(part)}; held are {known}{hint}")
        if head is None or len(found) == 1:
            return found[0]
        for component in found:
            if head in component.form.heads:
                return component
        held = joined_heads(component.form.heads for component in found)
        raise LayoutError(f"head {head} of {found[0]}; heads are {held[0]} to {held[-1]}")

    def address(self, *, layer: int, part: str, block: int = 0, token: int = 0, head: int | None = None) -> int:
        """Return the byte address of the first element of one row.

        Args:
            layer: global number of the layer.
            part: ``"k"``, ``"v"``, ``"kv"`` or the name of an extra.
            block: block id.
            token: slot within the block; in an opaque part, number of the sub-block.
            head: global number of the head; by default the first head of the layout.

        Raises:
            BlockIndexError: the block is out of range.
            LayoutError: the layer, part, token or head is not in this layout.
        """
        block = integer("block", block, right="it is a block id", error=BlockIndexError)
        token, head = integer("token", token), optional_integer("head", head)
        component = self.component(layer, part, head)
        if not 0 <= block < self.num_blocks:
            raise BlockIndexError(f"block {block}; blocks are 0 to {self.num_blocks - 1}")
        return component.address + component.form.block_offset(block) + component.row_offset(token, head)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a dump: all addresses, strides and facts of this layout as JSON (schema ``kvplan.layout/1``).

        A dump holds no data. :meth:`load` reads it in any process as an equal layout that cannot move bytes.

        Args:
            path: path of the file, best with suffix ``.json``. The file is replaced completely or not at all.

        Raises:
            LayoutError: the file cannot be written.

        >>> import numpy as np, tempfile
        >>> layout = KVLayout.from_tensors("block token dim", np.zeros((8, 4, 16), np.int8))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     layout.save(f"{folder}/cache.json")
        ...     KVLayout.load(f"{folder}/cache.json") == layout
        True
        """
        from kvplan.layout.spec import save

        save(self.built, path)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> KVLayout:
        """Read a dump that :meth:`save` wrote; the same as :meth:`from_spec` of the file.

        The layout has the addresses of the process that wrote the dump, so it cannot move bytes.

        Args:
            path: path of the file.

        Raises:
            LayoutError: the file cannot be read, or its content is invalid.
        """
        if not isinstance(path, str | PathLike):
            raise LayoutError(f"path is {quoted(path)}; give the path of a dump, as layout.save(path) wrote it")
        return cls.from_spec(Path(path))

    def slice(
        self, *, layers: Sequence[int] | None = None, heads: Heads | None = None, parts: Sequence[str] | None = None
    ) -> KVLayout:
        """Return a layout of some layers, heads or parts, over the same memory and with the same global numbers.

        Args:
            layers: global numbers of the layers to keep.
            heads: global numbers of the heads to keep: a range of step 1, or the ``heads`` of another layout. Each
                layer keeps those that it has of them. Parts without a head axis are kept whole.
            parts: names of the parts to keep.

        Raises:
            LayoutError: a layer, head or part is not in this layout, or nothing is left.

        >>> import numpy as np
        >>> layout = KVLayout.from_tensors("layer block kv token head dim", np.zeros((4, 8, 2, 16, 4, 64), np.int8))
        >>> part = layout.slice(layers=range(2, 4), heads=range(1, 3), parts=("k",))
        >>> part.layers, part.heads, part.parts, part.block_nbytes
        ((2, 3), range(1, 3), ('k',), 4096)
        """
        return KVLayout(sliced(self.built, self.layers, self.parts, layers, heads, parts), tensors=self.tensors)

    @cached_property
    def _identity(self) -> tuple[object, ...]:
        views = sorted(
            (c.layer, c.part, c.address, f.block, f.token, f.head, f.dim, f.head_start, f.table or ())
            for c in self.components
            for f in (c.form,)
        )
        return (self.num_blocks, self.block_tokens, self.device, self.seams, tuple(views))

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, KVLayout) and self._identity == other._identity)

    @cached_property
    def _hash(self) -> int:
        return hash(self._identity)

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        extents = " ".join(f"{axis}={size}" for axis, size in self.sizes.items())
        kinds = list(words(self.built))
        held = []
        if len(kinds) < 2 and self.layers != tuple(range(len(self.layers))):
            held.append(f"layers {number_ranges(self.layers)}")
        if self.heads[0] and not any(" heads " in kind for kind in kinds):
            held.append(f"heads {number_ranges(self.heads)}")
        if not kinds and self.parts not in (("k", "v"), ("kv",)):
            held.append(f"parts {' '.join(self.parts)}")
        return " | ".join([self.notation, extents, *kinds, f"{self.dtype} on {self.device}", *held])

    def __repr__(self) -> str:
        return f"KVLayout({str(self)!r})"

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: the notation and sizes, and the bytes of block 0 as a picture."""
        from kvplan.draw.block import layout_html

        return layout_html(self)


def _loaded(record: Built) -> KVLayout:
    """Return a pickled layout: over its shared pools if all of it lies in pools in use, otherwise as a record."""
    return KVLayout(mapped(record) or record)
