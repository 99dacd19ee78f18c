"""What comes from a file or another process is bounded in size, depth and work, and its errors are short."""

from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pytest

import kvplan
from kvplan import KVLayout, KVPlanError, LayoutError, NotationError
from kvplan.base.limits import LIMITS
from kvplan.base.reading import json_of, toml_of
from kvplan.catalogue.config import read_config
from kvplan.cli.main import main
from kvplan.cost.profile_file import from_json
from kvplan.errors import MESSAGE
from kvplan.layout.dump import document_of
from kvplan.nixl import nixl_card

SIZES = {"layer": 3, "block": 8, "token": 4, "head": 2, "dim": 16}
CARD = {"schema": "kvplan.nixl/1", "name": "peer", "layouts": {}, "metadata": ""}
PLAIN = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 32, "hidden_size": 4096,
         "num_key_value_heads": 8}  # fmt: skip
MANY = list(range(LIMITS.components + 1))
LATENT = {"num_hidden_layers": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}


def spec(notation="layer: kv block token head dim", **sizes):
    return {"notation": notation, "sizes": SIZES | sizes}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (spec("block layer kv token head dim", layer=10**6), "over 16,384 (layer, part)s"),
        (spec("block layer kv token head dim", layer=2**31), "over 16,384 (layer, part)s"),
        (spec(layer=80_000), "over 16,384 (layer, part)s"),
        (spec(head=5 * 10**8), "sizes make head 500000000; a spec has at most 65,536"),
        (spec(token=5 * 10**8), "sizes make token 500000000; a spec has at most 2,097,152"),
        (spec(dim=10**4000), "sizes['dim'] is a number of 13288 bits"),
        (spec(block=2**62, token=2**20), "pass the largest int64 address"),
        ({**spec(), "layers": [1, 2, 10**400]}, "layers[2] is a number of 1329 bits"),
        ({**spec(), "head_start": 2**31 - 1}, "heads are 2147483647 to 2147483648; the largest number of a head"),
        ({**spec(), "layer_start": 2**31}, "'layer_start' is 2147483648"),
        ({**spec(), "seams": [10**400]}, "seams[0] is a number of 1329 bits"),
        ({**spec(), "part": "p" * 201}, "part is 'ppp"),
        ({**spec(), "dtype": [1]}, "dtype [1] is unknown"),
        ({**spec(), "x" * 10**6: 1}, "spec has unknown key 'xxx"),
        (spec("1 " * 40_000 + "dim"), "notation has 80,003 characters"),
        ({"layouts": [spec("block dim")] * 3, "device": "x" * 10**6}, "'device' beside 'layouts'"),
    ],
)  # fmt: skip
def test_specs_past_a_bound(given, says):
    if "layouts" not in given:
        given["sizes"] = {axis: size for axis, size in given["sizes"].items() if axis in given["notation"]}
    with pytest.raises(LayoutError) as caught:
        KVLayout.from_spec(given)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 300


def test_large_caches_of_the_field_are_within():
    big = KVLayout.from_spec(spec(layer=128, block=10**6, token=64, head=256, dim=128))
    assert (len(big.components), big.num_blocks) == (256, 10**6)
    one = KVLayout.from_spec(spec("layer block kv token head dim", layer=80, block=1, token=1 << 20, head=8))
    assert kvplan.compile(one, one).runs == 1
    regions = KVLayout.from_spec(spec("block: layer kv token head dim", block=5000, layer=80))
    assert len(regions.regions) == 5000
    assert KVLayout.from_spec(json.loads(json.dumps(document_of(regions.built)))) == regions


def test_nested_layouts_are_built_once_and_only_so_deep():
    nested = {"notation": "block dim", "sizes": {"block": 4, "dim": 8}}
    for level in range(8):
        nested = {"layouts": [nested]}
        made = KVLayout.from_spec(nested)
        assert made.nbytes == 64, level
    for _ in range(2000):
        nested = {"layouts": [nested]}
    with pytest.raises(LayoutError, match="more than 8 levels deep"):
        KVLayout.from_spec(nested)


def test_nested_entries_lie_one_after_another():
    def entry(part):
        return {"notation": "block dim", "part": part, "sizes": {"block": 4, "dim": 8}, "address": 1 << 30}

    rest = [{k: v for k, v in entry(part).items() if k != "address"} for part in ("b", "c")]
    made = KVLayout.from_spec({"layouts": [{"layouts": [entry("a"), rest[0]]}, rest[1]]})
    assert [region.address - (1 << 30) for region in made.regions] == [0, 2 << 20, 4 << 20]


@pytest.mark.slow
def test_a_dump_of_heads_apart_counts_layers_and_parts_and_not_heads():
    """128 layers, K and V, 128 heads each in a tensor of its own are 256 (layer, part)s and 32,768 views."""
    sizes = {"layer": 128, "head": 128, "block": 2, "token": 1, "dim": 1}
    layout = KVLayout.from_spec(
        {"notation": "layer kv head: block token dim", "sizes": sizes, "strides": [8, 8, 1], "dtype": "uint8"}
    )
    assert len(layout.components) == 32_768 > LIMITS.components
    document = document_of(layout.built)
    assert KVLayout.from_spec(document) == layout
    document["components"][0]["held"][0] |= {"layers": [0] * (LIMITS.views + 1), "addresses": [0] * (LIMITS.views + 1)}
    with pytest.raises(LayoutError, match="over 131,072 addresses of layers, parts and heads; a dump has at most"):
        KVLayout.from_spec(document)


def test_layouts_of_one_file_share_its_budget():
    many = [spec(layer=1000) | {"layers": list(range(k * 1000, k * 1000 + 1000))} for k in range(9)]
    with pytest.raises(LayoutError, match="a file of several"):
        KVLayout.from_spec({"layouts": many})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("9" * 5000, "4300 digits"),
        ('{"a": 1, "a": 2}', "'a' is twice in one table"),
        (b"\xff\xfe{\x00}\x00", "utf-8"),
        ("x" * (65 << 20), "more than 67,108,864 bytes"),
    ],
    ids=["deep", "digits", "twice", "utf16", "long"],
)
def test_json_past_a_bound(text, says):
    with pytest.raises(LayoutError, match=says):
        json_of(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a." * 30_000 + "a = 1", "over 64 dots in line 1"),
        ("\n[" + "a . " * 100 + "a]", "over 64 dots in line 2"),
        ("a = " + "[" * 20_000, "nested too deeply|Invalid|Unclosed|nest"),
        ("# " + "x" * 70_000, "more than 65,536 bytes"),
        ("a = 1\na = 2", "Cannot overwrite"),
    ],
    ids=["dotted key", "dotted table", "deep", "long", "twice"],
)
def test_toml_past_a_bound(text, says):
    with pytest.raises(LayoutError, match=says):
        toml_of(text)


def test_toml_comments_may_have_dots():
    assert toml_of(f"# {'.' * 500}\na.b = 1  # one. two. three.") == {"a": {"b": 1}}


@pytest.mark.parametrize(
    ("card", "says"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"schema": ' + b"9" * 5000 + b"}", "4300 digits"),
        (json.dumps(CARD | {"metadata": "\ud800"}), "metadata is"),
        (json.dumps(CARD | {"name": ""}), "card, is ''"),
        (json.dumps(CARD | {"name": "\ud800"}), r"card, is '\\ud800'"),
        (json.dumps(CARD | {"name": "x" * 201}), "card, is 'xxx"),
        (json.dumps(CARD | {"schema": "x" * 10**6}), "has schema 'xxx"),
        (json.dumps(CARD | {"layouts": {"x" * 10**6: 3}}), "layout 'xxx"),
        (json.dumps(CARD)[:-1] + ', "name": "b"}', "'name' is twice"),
        (json.dumps(CARD).encode("utf-16"), "card cannot be read: "),
        ("[]", "card is \\[\\]"),
        (3, "card is a int"),
    ],
    ids=range(12),
)
def test_cards_past_a_bound(card, says):
    with pytest.raises(LayoutError, match=says) as caught:
        nixl_card.read(card)
    assert len(str(caught.value)) < 400


def test_layouts_of_one_card_share_its_budget():
    held = document_of(KVLayout.from_tensors("layer block dim", np.zeros((3000, 2, 4), np.uint8)).built)
    with pytest.raises(LayoutError, match=r"layout 'f' of the card: over 16,384"):
        nixl_card.read(json.dumps(CARD | {"layouts": dict.fromkeys("abcdef", held)}).encode())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (PLAIN | {"layer_types": [["full_attention"]] * 4}, "'layer_types' has ['full_attention']"),
        (PLAIN | {"layer_types": [None] * 4}, "'layer_types' has None"),
        (LATENT | {"indexer_types": 3}, "'indexer_types' has 3"),
        (LATENT | {"indexer_types": [["full"]]}, "'indexer_types' has ['full']"),
        (PLAIN | {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": "2"}, "is '2'; it is an int"),
        (PLAIN | {"num_hidden_layers": 5_000_000}, "is 5000000; it is an integer from 1 to 4096"),
        (PLAIN | {"num_hidden_layers": 2**64, "full_attention_interval": 4}, "is a number of 65 bits"),
        (PLAIN | {"model_type": "jamba", "attn_layer_period": 8, "attn_layer_offset": "4"}, "'attn_layer_offset'"),
        (PLAIN | {"head_dim": 2**40}, "'head_dim' is 1099511627776"),
        (PLAIN | {"num_key_value_heads": 2**63}, "from 1 to 65536"),
        ({"text_config": "x" * 10**6}, "its text_config is 'xxx"),
    ],
)
def test_configs_past_a_bound(given, says, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(given))
    with pytest.raises(LayoutError) as caught:
        read_config(path)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 500
    assert main(["inspect", "--config", str(path)]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "9" * 5000, '{"schema": "kvplan.profile", "version": ' + "9" * 4000 + "}"]
)
def test_profiles_past_a_bound(text):
    with pytest.raises(KVPlanError) as caught:
        from_json(text)
    assert len(str(caught.value)) < 300


def test_messages_are_bounded_whatever_they_quote():
    assert len(str(LayoutError("x" * 10**6))) == MESSAGE
    assert str(LayoutError("short")) == "short"
    assert str(pickle.loads(pickle.dumps(LayoutError("short")))) == "short"
    with pytest.raises(NotationError) as caught:
        kvplan.layout.notation.parse("block " * 50_000 + "heads")
    assert len(str(caught.value)) < 400
    assert len(caught.value.text) == 300_005
    lines = str(caught.value).splitlines()
    assert lines[1][lines[2].index("^") :].startswith("block ")
    assert lines[1].startswith("    ")
    assert lines[1].endswith("...")


# ---- dumps that contradict themselves -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dump():
    tensors = [np.zeros((2, 8, 4, 2, 16), np.uint8) for _ in range(3)]
    return json.loads(json.dumps(document_of(KVLayout.from_tensors("layer: kv block token head dim", tensors).built)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sizes": {"layer": 99}}, "sizes say layer=99, the components are of 3 layers"),
        ({"sizes": {"head": 7}}, "sizes say head=7, the components have 2"),
        ({"sizes": {"token": 5}}, "sizes say token=5, the components have 4"),
        ({"sizes": {"dim": 2**60}}, "sizes say dim=1152921504606846976 of dtype 'uint8', the components have 16 bytes"),
        ({"sizes": {"kv": 3}}, "sizes say kv=3"),
        ({"notation": "block token dim"}, "sizes name 'head', 'kv', 'layer'; no notation has such"),
        (
            {"notation": "layer: kv block head dim", "sizes": {"token": None}},
            "no notation of 'layer: kv block head dim' has these",
        ),
        ({"itemsize": 4096}, "itemsize is 4096; that of 'uint8' is 1"),
        ({"itemsize": "x"}, "itemsize is 'x'"),
        ({"itemsize": True}, "itemsize is True"),
        ({"dtype": "float32"}, "itemsize is 1; that of 'float32' is 4"),
        ({"dtype": "float32", "itemsize": 4}, "sizes say dim=16 of dtype 'float32'"),
        ({"dtype": "no such thing"}, "that of 'no such thing' is not known"),
        ({"dtype": ""}, "dtype is ''"),
        ({"dtype": "x" * 10**6}, "dtype is 'xxx"),
        ({"parts": ["k", "v", "z"]}, "parts name 'z', and no component holds it"),
        ({"parts": ["k", "v", "k"]}, "parts name one twice"),
    ],
)
def test_dumps_that_contradict_themselves(dump, change, says):
    broken = copy.deepcopy(dump)
    sizes = {**dump["sizes"], **change.get("sizes", {})}
    broken |= change | {"sizes": {axis: size for axis, size in sizes.items() if size is not None}}
    with pytest.raises(LayoutError) as caught:
        KVLayout.from_spec(broken)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"head_start": 2**31 - 1}, "2 heads from number 2147483647"),
        ({"opaque": True, "token": []}, "a component has no token axis, a head axis; no notation"),
        ({"headed": False, "head": []}, "a component has a token axis, no head axis"),
        ({"head": [[2, 0]] * 1000}, "a number of 1001 bits heads"),
        ({"head": [[LIMITS.heads * 2, 1]]}, "at most 65,536"),
        ({"dim": [[2**40, 1], [2**40, 0]]}, "more than any memory"),
        ({"held": [{"part": "k", "layers": MANY, "addresses": MANY}]}, "over 16,384"),
    ],
)  # fmt: skip
def test_components_past_a_bound(dump, change, says):
    broken = copy.deepcopy(dump)
    broken["components"][0] |= change
    with pytest.raises(LayoutError) as caught:
        KVLayout.from_spec(broken)
    assert says in str(caught.value)


def test_regions_that_stand_there_twice(dump):
    with pytest.raises(LayoutError, match="regions hold one allocation twice"):
        KVLayout.from_spec(dump | {"regions": dump["regions"] * 2})


def test_slices_of_merged_layouts_tell_sizes_of_their_own():
    kv = KVLayout.from_tensors("layer: block kv token head dim", [np.zeros((8, 2, 4, 3, 16), np.float16)] * 1)
    scale = KVLayout.from_tensors("block token head dim", np.zeros((8, 4, 1, 6), np.uint8), part="scale", layers=[5])
    state = KVLayout.from_tensors("block dim", np.zeros((8, 100), np.int8), part="state", layers=[7])
    merged = KVLayout.merge([kv, scale, state])
    assert merged.sizes == {"layer": 3, "block": 8, "kv": 2, "token": 4, "head": 3, "dim": 16}
    held = merged.slice(parts=["scale"])
    assert held.sizes == {"layer": 1, "block": 8, "kv": 1, "token": 4, "head": 1, "dim": 6}
    for layout in (merged, held, merged.slice(parts=["k"]), merged.slice(layers=[7]), merged.slice(layers=[5, 7])):
        assert KVLayout.from_spec(json.loads(json.dumps(document_of(layout.built)))) == layout


# ---- tensors without memory, names that are no text --------------------------------------------------------------


class Fake:
    """What torch's FakeTensor shows of itself, without its mode."""

    shape, device, dtype = (4, 8), "cpu", "torch.uint8"

    def __init__(self, address=0):
        self.address = address

    def data_ptr(self):
        return self.address

    def stride(self):
        return (8, 1)

    def element_size(self):
        return 1


def test_tensors_without_memory_are_refused():
    with pytest.raises(LayoutError, match=r"a Fake of shape \(4, 8\) has the address null: it has no memory"):
        KVLayout.from_tensors("block dim", Fake())
    assert KVLayout.from_tensors("block dim", Fake(4096)).num_blocks == 4
    marked = Fake(4096)
    marked.fake_mode = object()
    with pytest.raises(LayoutError, match="a tensor of class Fake has no memory"):
        KVLayout.from_tensors("block dim", marked)
    with pytest.raises(LayoutError, match="holds nothing"):
        KVLayout.from_tensors("block dim", np.zeros((0, 8), np.uint8))


@pytest.mark.slow
def test_fake_tensors_of_torch_are_refused():
    torch = pytest.importorskip("torch")
    with torch._subclasses.FakeTensorMode():
        fake = torch.zeros(4, 8, dtype=torch.uint8)
    with pytest.raises(LayoutError, match="FakeTensor has no memory"):
        KVLayout.from_tensors("block dim", fake)
    freed = torch.zeros(4, 8, dtype=torch.uint8)
    freed.untyped_storage().resize_(0)
    with pytest.raises(LayoutError, match="has the address null"):
        KVLayout.from_tensors("block dim", freed)


def test_a_report_of_a_file_whose_name_is_no_text(tmp_path, capsys):
    source = tmp_path / "cache\udcff.json"
    source.write_text(json.dumps(spec()))
    page = tmp_path / "page\udcfe.html"
    assert main(["report", str(source), "--output", str(page)]) == 0
    assert r"cache\udcff.json" in page.read_text(encoding="utf-8")
    assert capsys.readouterr().err == ""


def test_layers_that_hold_different_parts_are_compared(tmp_path, capsys):
    one = np.zeros((8, 2, 64), np.uint8)
    rows = [KVLayout.from_tensors("block dim", one[:, k], part="kv"[k], layers=[k]) for k in (0, 1)]
    KVLayout.merge(rows).save(tmp_path / "m.json")
    path = str(tmp_path / "m.json")
    assert main(["diff", path, path]) == 0
    assert "one run a block" in capsys.readouterr().out
    assert main(["report", path, path, "--output", str(tmp_path / "page.html")]) == 0
    other = np.zeros((8, 3, 64), np.uint8)
    apart = [KVLayout.from_tensors("block dim", other[:, k], part="kv"[k % 2], layers=[k]) for k in (0, 1, 2)]
    more = KVLayout.merge(
        [*rows, KVLayout.from_tensors("block dim", np.zeros((8, 64), np.uint8), part="k", layers=[2])]
    )
    more.save(tmp_path / "a.json")
    KVLayout.merge(apart).save(tmp_path / "b.json")
    assert main(["diff", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.partition("\n{")[2].join(["{", ""]))["first_break"]["holds"] == (
        "2 parts of layers, whole rows"
    )
