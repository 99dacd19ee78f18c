"""What `kvplan inspect --model` answers, its numbers computed by hand."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from kvplan.catalogue.models import models
from kvplan.cli import main
from tests.commands import BLOCKED, ROOT, answer, document, fails, python

LLAMA = ("inspect", "--model", "llama-3.1-70b", "--tp", "4")


def test_it_reads_well(capsys):
    # 80 layers x 2 (K, V) x 2 heads x 128 x 2 bytes = 81,920 a token; x 16 = 1,310,720 a block; 80 x 2 runs of 16 rows
    # of 2 heads: 8,192 bytes.
    assert (
        answer(
            capsys, *LLAMA, "--engine", "vllm-split-kv", "--dtype", "bf16", "--host", "page-first", "--profile", "h100"
        )
        == """\
model     llama-3.1-70b, 80 layers
source    config.json of meta-llama/Llama-3.1-70B, as quoted in public KV-cache
          calculators
KV heads  8, 2 on each of 4 ranks
a token   81,920 bytes (80 KiB) a rank, 327,680 on all 4
device    vllm-split-kv, blocks of 16
          layer: kv block token head dim
host      page-first, blocks of 16
          block layer kv token head dim
link      55.1 GB/s for each rank is assumed; its times are lower bounds

group  layers  rows of             window  a token    a block
─────────────────────────────────────────────────────────────
full       80  2 x 128 bf16, K, V  -        81,920  1,310,720

group  unit  runs  bytes each  host extents  bytes each  aligned
────────────────────────────────────────────────────────────────
full     16   160       8,192             1   1,310,720    8,192

context  blocks    bytes a rank                runs  at the link
────────────────────────────────────────────────────────────────
     1k      64      83,886,080   80 MiB     10,240      1.52 ms
    32k   2,048   2,684,354,560  2.5 GiB    327,680      48.7 ms
   128k   8,192  10,737,418,240   10 GiB  1,310,720       195 ms

context  load by the best path  store by the best path
──────────────────────────────────────────────────────
     1k  1.81 ms, kernel        1.75 ms, kernel
    32k  54.5 ms, kernel        52.9 ms, kernel
   128k  218 ms, kernel         211 ms, kernel

times   predicted, as on NVIDIA H100 80GB HBM3
better  none, of 60 orders of the host side
"""
    )


@pytest.mark.parametrize(
    ("engine", "host", "runs", "nbytes"),
    [
        ("vllm", "page-first", 5120, 256),  # HND against NHD: a row of one head
        ("vllm", "vllm-host", 80, 16_384),  # a page a layer on both sides
        ("vllm", "page-first-HND", 5120, 256),  # K and V interleave in the content of the one, not of the other
        ("sglang", "page-first", 160, 8192),
        ("sglang", "sglang-page-first", 2560, 512),  # a row of two heads
        ("flashinfer", "page-first", 80, 16_384),
        ("tensorrt-llm", "page-first-HND", 1, 1_310_720),
        ("transformers", "page-first", 1, 1_310_720),
        ("cross-layer", "block layer kv token head dim", 1, 1_310_720),
        ("layer: block kv token head dim", "lmcache", 160, 8192),
    ],
)
def test_engines_and_hosts(capsys, engine, host, runs, nbytes):
    (group,) = document(capsys, *LLAMA, "--engine", engine, "--host", host)["groups"]
    assert (group["runs"], group["run_nbytes"], group["unit_nbytes"]) == (runs, [nbytes, nbytes], 1_310_720)


def test_latents_are_on_every_rank(capsys):
    facts = document(capsys, "inspect", "--model", "deepseek-v3", "--tp", "8", "--block-tokens", "64")
    assert facts["token_nbytes"] == {"rank": 70_272, "all": 562_176}  # 61 x 576 x 2
    assert facts["groups"][0]["block_nbytes"] == 61 * 73_728
    assert facts["groups"][0]["copies"] == 8
    assert facts["contexts"][0]["nbytes"] == 1024 * 70_272
    assert "KV heads  none: each of 8 ranks holds every row" in answer(
        capsys, "inspect", "--model", "deepseek-v3", "--tp", "8"
    )
    assert "KV heads  none\n" in answer(capsys, "inspect", "--model", "kimi-k2")


def test_packed_rows_and_index_rows(capsys):
    facts = document(capsys, "inspect", "--model", "deepseek-v3.2", "--dtype", "fp8_ds_mla", "--block-tokens", "64")
    latent, index = facts["groups"]
    assert (latent["block_nbytes"], index["block_nbytes"]) == (61 * 41_984, 61 * 8_448)
    assert (latent["dtype"], latent["dim"], index["dim"]) == ("uint8", 656, 132)
    assert facts["token_nbytes"]["rank"] == 61 * (656 + 132)


def test_sliding_windows_are_honoured(capsys):
    # 18 layers each; 2 heads x 64 x 2 (K, V) x 2 bytes = 512 a layer and token, 9,216 a group.
    facts = document(capsys, "inspect", "--model", "gpt-oss-120b", "--tp", "4")
    assert facts["token_nbytes"]["rank"] == 18_432
    assert facts["kept_token_nbytes"]["rank"] == 9_216
    assert [c["nbytes"] for c in facts["contexts"]] == [9_216 * (n + 128) for n in (1024, 32_768, 131_072)]
    assert [c["blocks"] for c in facts["contexts"]] == [n // 16 + 8 for n in (1024, 32_768, 131_072)]


def test_replicated_heads(capsys):
    text = answer(capsys, "inspect", "--model", "gpt-oss-120b", "--tp", "16")
    assert "KV heads      8, 1 on each of 16 ranks: replicated, every head is on 2 of them" in text
    assert "past windows  4,608 bytes (4.5 KiB) a rank, 73,728 on all 16" in text


def test_states_come_once_a_request(capsys):
    # 28 layers x 155,648 x 2 bytes; 4 layers x 2 x 8 heads x 128 x 2 = 16,384 a token.
    facts = document(capsys, "inspect", "--model", "jamba-v0.1", "--tp", "2")
    assert facts["state_nbytes"] == {"rank": 4_358_144, "all": 8_716_288}
    assert facts["contexts"][0]["nbytes"] == 4_358_144 + 1024 * 8_192
    text = answer(capsys, "inspect", "--model", "jamba-v0.1")
    assert "a state   8,716,288 bytes (8.31 MiB), one a request" in text
    assert "state  a state     28     311,296             1   8,716,288   16,384" in text


def test_compressed_rows(capsys):
    facts = document(capsys, "inspect", "--model", "deepseek-v4-flash", "--dtype", "fp8_ds_mla", "--block-tokens", "64")
    csa, hca, index, sliding = facts["groups"]
    assert csa["block_nbytes"] == 21 * 37_376
    assert (csa["token_nbytes"], hca["token_nbytes"], index["token_nbytes"]) == (3066, 91.25, 357)
    # 1k tokens: 256 rows, 8 rows in one block, 256 index rows, and a window of two blocks on all 43 layers.
    assert facts["contexts"][0]["nbytes"] == 21 * 256 * (584 + 68) + 20 * 64 * 584 + 43 * 128 * 584
    assert sliding["window"] == 128
    assert "a token       28,626.2 bytes (28 KiB)" in answer(
        capsys, "inspect", "--model", "deepseek-v4-flash", "--dtype", "fp8_ds_mla"
    )


def test_blocks_of_another_size_on_the_host(capsys):
    facts = document(capsys, *LLAMA, "--engine", "vllm-split-kv", "--host-block-tokens", "8")
    assert (facts["groups"][0]["unit_tokens"], facts["groups"][0]["runs"]) == (8, 160)
    assert facts["contexts"][0]["runs"] == 160 * 128
    assert "full      8   160       4,096" in answer(
        capsys, *LLAMA, "--engine", "vllm-split-kv", "--host-block-tokens", "8"
    )


def test_a_rank_of_a_shared_pool(capsys):
    argv = ("--engine", "flashinfer", "--host", "sglang-page-unified")
    (group,) = document(capsys, *LLAMA, *argv)["groups"]
    assert (group["runs"], group["run_nbytes"], group["host_extents"]["count"]) == (80, [16_384, 16_384], 1)


def test_the_link_is_an_assumption(capsys):
    assert document(capsys, *LLAMA, "--link-gbps", "27.55")["contexts"][1]["seconds"] == pytest.approx(0.0974, rel=1e-3)
    assert "link      27.5 GB/s for each rank is assumed" in answer(capsys, *LLAMA, "--link-gbps", "27.5")


def test_to_another_gpu(capsys):
    # HND in a page of K and V, against NHD in planes: a run is a row of one head, 128 x 2 bytes. A unit is 16 tokens:
    # 80 layers x 2 (K, V) x 16 x 2 heads = 5,120 runs. 32k tokens are 2,048 units, 2,684,354,560 bytes a rank.
    facts = document(capsys, *LLAMA, "--tokens", "32k", "--peer", "nvlink", "--peer-layout", "flashinfer")
    (group,), (context,) = facts["groups"], facts["contexts"]
    assert (group["peer"]["runs"], group["peer"]["run_nbytes"], group["peer"]["alignment"]) == (5120, [256, 256], 256)
    assert group["peer"]["extents"] == {"count": 80, "min_nbytes": 16_384, "max_nbytes": 16_384}
    assert (context["tokens"], context["nbytes"], context["peer"]["runs"]) == (32_768, 2_684_354_560, 10_485_760)
    assert context["peer"]["seconds"] == pytest.approx(2_684_354_560 / 390e9)
    assert context["peer"]["kernel_seconds"] == pytest.approx(2_684_354_560 / 366.6e9)
    assert context["peer"]["host_seconds"] == pytest.approx(2 * 2_684_354_560 / 55.1e9)
    assert facts["peer"] == {
        "layout": "flashinfer-NHD", "notation": "layer: block kv token head dim", "block_tokens": 16,
        "link": "NVLink 4 of H100 and H200", "link_gbps": 390.0, "kernel_gbps": pytest.approx(366.6),
    }  # fmt: skip


def test_to_another_gpu_in_words(capsys):
    # The same layout, larger blocks: a unit is a block of the device, 160 runs of 16 tokens x 2 heads x 256 bytes.
    text = answer(capsys, *LLAMA, "--engine", "vllm-split-kv", "--tokens", "500,32k",
                  "--peer", "100", "--peer-block-tokens", "64")  # fmt: skip
    assert "peer       vllm-split-kv, blocks of 64\n" in text
    assert "peer link  100 GB/s for one large copy (as given); a kernel is assumed to reach" in text
    # 500 tokens are 32 blocks, 41,943,040 bytes: 0.419 ms, 0.446 by a kernel, and twice 0.761 through the host.
    assert text.endswith(
        """group  unit  runs  bytes each  peer extents  bytes each  aligned
────────────────────────────────────────────────────────────────
full     16   160       8,192           160       8,192    8,192

context  runs to the peer  at the link  by kernel  through the host
───────────────────────────────────────────────────────────────────
    500             5,120       419 us     446 us           1.52 ms
    32k           327,680      26.8 ms    28.6 ms           97.4 ms
"""
    )


def test_the_times_by_path_tell_orders_apart(capsys):
    """Rows of one head against whole pages: the link's time is the same, and the predicted times are not."""
    rows, pages = (
        document(capsys, *LLAMA, "--host", host, "--contexts", "32k", "--profile", "h100", "--no-advice")["contexts"][0]
        for host in ("page-first", "vllm-host")
    )
    assert rows["seconds"] == pages["seconds"]
    for route in ("load", "store"):
        assert rows[route]["seconds"] > 1.2 * pages[route]["seconds"]
        assert set(rows[route]["paths"]) <= {"kernel", "staged", "copy_engine", "copy_engine_2d", "copy_engine+kernel"}


def test_the_better_order_of_the_host_side(capsys):
    facts = document(capsys, *LLAMA, "--contexts", "1k,32k", "--profile", "h100")
    (better,) = facts["better"]
    assert (better["group"], better["tokens"], better["block_tokens"]) == ("full", 32_768, 16)
    assert better["tried"] > 10
    last = facts["contexts"][1]
    assert better["now"] == {route: pytest.approx(last[route]["seconds"]) for route in ("load", "store")}
    assert sum(better["seconds"].values()) < sum(better["now"].values())
    again = document(capsys, *LLAMA, "--contexts", "32k", "--profile", "h100", "--host", better["notation"])
    for route in ("load", "store"):
        assert again["contexts"][0][route]["seconds"] == pytest.approx(better["seconds"][route])
    assert again["better"][0]["notation"] is None
    assert ", of " in answer(capsys, *LLAMA, "--profile", "h100", "--host", better["notation"]).splitlines()[-1]
    assert document(capsys, *LLAMA, "--no-advice")["better"] == []


def test_a_hybrid_has_a_better_order_for_each_group(capsys):
    facts = document(capsys, "inspect", "--model", "jamba-v0.1", "--profile", "h100")
    assert [one["group"] for one in facts["better"]] == [group["name"] for group in facts["groups"]]


def test_without_a_peer_the_answer_is_as_before(capsys):
    facts = document(capsys, *LLAMA)
    assert not [found for found in (facts, facts["groups"][0], facts["contexts"][0]) if "peer" in found]
    assert [context["tokens"] for context in facts["contexts"]] == [1024, 32_768, 131_072]


def test_states_and_latents_to_another_gpu(capsys):
    facts = document(capsys, "inspect", "--model", "jamba-v0.1", "--tp", "2", "--peer", "PCIe")
    state = next(group for group in facts["groups"] if group["kind"] == "state")
    # 28 layers, each one state of 155,648 bytes a rank.
    assert (state["peer"]["runs"], state["peer"]["run_nbytes"]) == (28, [155_648, 155_648])
    assert facts["peer"]["link_gbps"] == 50
    assert facts["contexts"][0]["peer"]["seconds"] == pytest.approx((4_358_144 + 1024 * 8_192) / 50e9)
    latent = document(capsys, "inspect", "--model", "deepseek-v3", "--peer", "nvlink", "--peer-layout", "mla")
    assert latent["groups"][0]["peer"]["run_nbytes"] == [16 * 1152, 16 * 1152]


def test_the_list_of_models(capsys):
    text = answer(capsys, "inspect", "--model")
    assert [line.split()[0] for line in text.splitlines()[2:]] == list(models())
    listed = document(capsys, "inspect", "--model")
    assert listed["schema"] == "kvplan.models/1"
    assert [one["name"] for one in listed["models"]] == list(models())


@pytest.mark.parametrize("name", models())
def test_every_model_fits_80_columns(capsys, name):
    assert max(map(len, answer(capsys, "inspect", f"--model={name}").splitlines())) <= 80


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "llama-3.1-80b"], "near it: llama-3.1-8b, llama-3.1-70b, llama-3.1-405b"),
        (["--model", "?"], "known are llama-3.1-8b, "),
        (["--model", "qwen3-8b", "--engine", "vlm"], "a notation; did you mean vllm?"),
        (["--model", "qwen3-8b", "--host", "?"], "there are vllm-host, page-first"),
        (["--model", "deepseek-v3", "--host", "page-first"],
         "--host 'page-first' is a layout of mha caches, and the model's is mla; host layouts of that are mla-page-f"),
        (["--model", "qwen3-8b", "--engine", "mla"], "is a layout of mla caches"),
        (["--model", "deepseek-v3", "--engine", "transformers"], "has no mla layout in the catalogue; there are mla,"),
        (["--model", "deepseek-v3", "--host", "block layer kv token head dim"], "no kv axis"),
        (["--model", "qwen3-8b", "--host", "block layer token dim"], "is of kind mla"),
        (["--model", "qwen3-8b", "--host", "block kv token head dim"], "has no axis 'layer'"),
        (["--model", "qwen3-8b", "--host", "block layer kv token head.0 head.1 dim"], "sizes["),
        (["--model", "phi-3-medium", "--tp", "4"], "10 KV heads over 4 tensor-parallel ranks"),
        (["--model", "qwen3-next-80b-a3b", "--tp", "32"], "cannot be divided among 32 tensor-parallel ranks; tp must"),
        (["--model", "qwen3-8b", "--tp", "0"], "'0' is not a whole number of at least 1"),
        (["--model", "qwen3-8b", "--dtype", "int3"], "dtype 'int3' is unknown"),
        (["--model", "qwen3-8b", "--link-gbps", "x"], "'x' is not a rate in GB/s above 0"),
        (["--model", "qwen3-8b", "--link-gbps", "nan"], "is not a rate in GB/s"),
        (["--model", "qwen3-8b", "--peer", "infiniband"],
         "'infiniband' is not a link between GPUs; give 'nvlink', 'pcie', or a rate in GB/s above 0"),
        (["--model", "qwen3-8b", "--peer", "-1"], "--peer: "),
        (["--model", "qwen3-8b", "--peer", "nvlink", "--peer-layout", "vlm"], "--peer-layout 'vlm' is nei"),
        (["--model", "qwen3-8b", "--peer", "nvlink", "--peer-layout", "page-first"], "'page-first' is neither"),
        (["--model", "qwen3-8b", "--peer-layout", "vllm"], "--peer-layout needs --peer, the link to the other GPU"),
        (["--model", "qwen3-8b", "--peer-block-tokens", "64"], "--peer-block-tokens needs --peer"),
        (["--model", "qwen3-8b", "--tokens", "32m"], "'32m' is not a number of tokens from 1 to 2^31 - 1, as in 32k"),
        (["--model", "qwen3-8b", "--tokens", "1k,0"], "'0' is not a number of tokens"),
        (["--model", "qwen3-8b", "--config", "a.json"], "not allowed with argument"),
        (["--model", "qwen3-8b", "--sizes", "layer=1"], "unrecognized arguments: --sizes"),
        (["--config", "nowhere.json"], "cannot read the config 'nowhere.json'"),
        (["--config"], "--config: expected one argument"),
    ],
)  # fmt: skip
def test_usage_is_one_line_and_2(capsys, argv, message):
    assert message in fails(capsys, "inspect", *argv)


def test_a_config(capsys, tmp_path):
    path = tmp_path / "config.json"
    given = {"model_type": "llama", "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
    path.write_text(json.dumps(given | {"hidden_size": 8192}))
    facts = document(capsys, "inspect", "--config", str(path), "--tp", "4")
    assert facts["token_nbytes"]["rank"] == 81_920
    assert facts["model"]["source"] == str(path)
    states = {"layer_types": ["linear_attention"], "num_hidden_layers": 1, "mamba_d_state": 16, "mamba_expand": 2}
    path.write_text(json.dumps(states | {"hidden_size": 64, "mamba_d_conv": 4}))
    assert "has no layer with attention" in fails(capsys, "inspect", "--config", str(path))


def test_what_is_remembered_is_said(capsys):
    assert "Mistral-Large-Instruct-2407 (from" in answer(capsys, "inspect", "--model", "mistral-large-123b")


def test_help(capsys):
    assert main(["inspect", "--model", "--help"]) == 0
    assert "\n  kvplan inspect --model llama-3.1-70b" in capsys.readouterr().out
    assert main(["inspect", "--help"]) == 0
    assert "SPEC" in capsys.readouterr().out


@pytest.mark.slow
def test_it_starts_light():
    argv = ["inspect", *LLAMA[1:], "--json"]
    done = python("-c", BLOCKED.format(blocked=["torch", "triton", "cuda", "numba", "rich"], argv=argv))
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["schema"] == "kvplan.inspect-model/1"


def test_the_document_tells_the_truth(capsys):
    text = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    command, shown = re.search(r"```console\n\$ kvplan (inspect --model [^\n]*)\n(.*?)```", text, re.DOTALL).groups()
    assert answer(capsys, *shlex.split(command)) == shown
    for argv in (LLAMA, (*LLAMA, "--peer", "nvlink"), ("inspect", "--model")):
        facts = document(capsys, *argv)
        section = text[text.index(f"\n`{facts['schema']}`") :].partition("\n`kvplan.plan")[0]
        (nested,) = [facts[key][0] for key in ("groups", "models") if key in facts]
        told = nested.get("peer", {}) | facts.get("peer", {}) | facts.get("contexts", [{}])[0].get("peer", {})
        assert not [key for key in (*facts, *nested, *told) if key != "schema" and f"`{key}`" not in section]
