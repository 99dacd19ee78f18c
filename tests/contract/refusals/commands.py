"""Refusals of the command line, by exit status 2 and one line on stderr: arguments, named models, configs, files."""

from __future__ import annotations

import shlex

from tests.commands import GPU, HOST, ROOT
from tests.contract.refusals.table import REFUSED, UsageError, command, file

WORDS = {"GPU": GPU, "HOST": HOST, "ROOT": str(ROOT), "PROJECT": str(ROOT / "pyproject.toml"), "LONG": "x" * 5000}
NUMBERS = {"DIGITS": "9" * 5000, "30_DIGITS": "9" * 30, "18_DIGITS": "9" * 18}


def line(text):
    """A command's line, in which words in capitals stand for paths, or for much."""
    return command(*[(WORDS | NUMBERS).get(word, word) for word in shlex.split(text)])


PLAN, NUMPY, NOTED = "plan GPU HOST --src 0 --dst 1", "demo --engine numpy", "inspect 'block token dim' --sizes"
QWEN, DEEPSEEK, CPU = "inspect --model qwen3-8b", "inspect --model deepseek-v3", "bench --device cpu"
REFUSED["python -m kvplan", line, UsageError] = [
    ("", "required: COMMAND ... 'kvplan --help'"),
    ("inspekt", "'inspekt' ... invalid choice ... inspect"),
    ("LONG", "'xxx"),
    ("inspect", "required: SPEC ... 'kvplan inspect --help'"),
    ("inspect GPU --jso", "'kvplan inspect --help' ... unrecognized arguments"),
    ("inspect nowhere.toml", "'nowhere.toml' ... cannot read ... No such file"),
    ("inspect /dev/null", "'/dev/null' ... cannot read ... device"),
    ("inspect ROOT", "directory"),
    ("inspect PROJECT", "pyproject.toml ... 'build-system'"),
    ("inspect GPU --json --svg ''", "'' ... written ... cannot"),
    ("inspect GPU --svg nowhere/made.svg", "'nowhere/made.svg' ... written ... cannot"),
    ("inspect GPU --block 1024", "--block 1024 ... are 0 to 1023"),
    ("inspect GPU --block=-1", "'-1' ... whole number of at least 0"),
    ("inspect GPU --picture --json", "--picture draws in the terminal"),
    ("inspect GPU --dtype int8", "dtype goes ... notation"),
    ("inspect 'block token dim'", "sizes['block'] ... [] ... block=EXTENT"),
    (f"{NOTED} block=4,token=4,dim=8 --dtype int3", "'int3' ... unknown ... dtype"),
    (f"{NOTED} block", "'block' ... AXIS=EXTENT ... layer=80 ... block=1024"),
    (f"{NOTED} block=1,block=2", "'block' ... given twice"),
    (f"{NOTED} block=4,token=4,dim=8,head=2", "'head' ... sizes name"),
    ("explain GPU", "DST ... arguments are ... required"),
    ("explain GPU nowhere.toml", "nowhere.toml ... No such file"),
    ("explain GPU HOST --sizes block=4", "sizes goes ... notation"),
    ("explain GPU HOST --dst-device cpu", "device goes ... notation"),
    ("explain GPU HOST --blocks 5000", "block 5000 ... are 0 ... 1023"),
    ("explain GPU HOST --svg nowhere/made.svg", "'nowhere/made.svg' ... written ... cannot"),
    ("explain GPU HOST --change C", "--change ... 'C' ... choice"),
    ("explain GPU HOST --blocks 0 --profile zzz", "zzz ... default"),
    ("explain GPU HOST --blocks 0 --overlap odd", "overlap 'odd' ... decode"),
    ("diff GPU HOST", "'diff' is now 'kvplan explain SRC DST'"),
    ("plan GPU HOST --src 0", "arguments are ... required"),
    ("plan GPU HOST --src 3-1 --dst 0", "'3-1' ... in 0,1,4 ... -7"),
    ("plan GPU HOST --src 0,,1 --dst 0", "'' ... '0,,1'"),
    ("plan GPU HOST --src x --dst 1", "'x' ... block id"),
    ("plan GPU GPU --src DIGITS --dst 0", "block id"),
    ("plan GPU HOST --src 0-999999999999 --dst 0", "block 999999999999 ... blocks there ... names"),
    ("plan GPU HOST --src 0 --dst 1024", "--dst names block 1024 ... are 0 to 1023"),
    ("plan GPU HOST --src 0,1 --dst 1", "2 src ... cover 2 units"),
    (f"{PLAN} --src-skip x", "'x' ... least 0"),
    (f"{PLAN} --limit some", "'some' ... least 0"),
    (f"{PLAN} --max-bytes 0", "max_nbytes ... is 0"),
    *[(f"{PLAN} --max-bytes {text}", "max") for text in ("-1", "1.5", "DIGITS")],
    ("report GPU", "output"),
    ("report GPU --output ''", "'' ... written ... output"),
    ("report GPU --output /proc/nope/page.html", "written ... cannot"),
    ("report GPU --blocks 0-3 --output page.html", "blocks are for a plan ... give B"),
    ("report nowhere.toml --output page.html", "nowhere.toml ... No such file"),
    ("pairs --host zzz", "zzz ... page-first"),
    ("pairs --device zzz", "zzz ... vllm-split-kv"),
    ("advise nowhere.json", "nowhere.json ... No such file"),
    ("backends extra", "unrecognized arguments: extra"),
    ("calibrate --device cuda:99", "cuda"),
    *[(f"doctor --device '{text}'", f"--device ... {text!r} ... as in cuda:0") for text in ("cpu", "cuda:x", "0", "")],
    *[(f"{NUMPY} --requests {text}", f"--requests ... {text!r} ... at least 1") for text in ("0", "-1", "x")],
    *[(f"{NUMPY} {option} 18_DIGITS", option) for option in ("--requests", "--tokens")],
    ("inspect --model llama-3.1-80b", "llama-3.1-8b, llama-3.1-70b"),
    ("inspect --model ?", "known are llama-3.1-8b"),
    (f"{QWEN} --engine vlm", "vlm ... vllm"),
    (f"{QWEN} --engine mla", "mla caches"),
    (f"{DEEPSEEK} --engine transformers", "transformers ... there are"),
    (f"{QWEN} --host ?", "there are ... page-first"),
    (f"{DEEPSEEK} --host page-first", "'page-first' ... host layouts ... that are ... mha ... mla-page-first"),
    (f"{DEEPSEEK} --host 'block layer kv token head dim'", "kv axis"),
    (f"{QWEN} --host 'block layer token dim'", "kind mla"),
    (f"{QWEN} --host 'block kv token head dim'", "'layer' ... axis"),
    (f"{QWEN} --host 'block layer kv token head.0 head.1 dim'", "sizes['head.0']"),
    ("inspect --model phi-3-medium --tp 4", "10 ... KV ... over 4 tensor"),
    ("inspect --model qwen3-next-80b-a3b --tp 32", "32 tensor-parallel ranks"),
    (f"{QWEN} --rank=2", "--rank=2"),
    (f"{QWEN} --dtype int3", "'int3' ... unknown ... dtype"),
    (f"{QWEN} --link-gbps x", "'x' ... GB ... above 0"),
    (f"{QWEN} --link-gbps nan", "nan ... rate"),
    (f"{QWEN} --tokens 1k,0", "'0' ... number ... least 1"),
    (f"{QWEN} --config a.json", "--config ... not allowed with"),
    (f"{QWEN} --sizes layer=1", "unrecognized arguments: --sizes"),
    ("inspect --config nowhere.json", "'nowhere.json' ... cannot read ... config"),
    (f"{CPU} --sizes 4X", "'4X' ... in 512"),
    (f"{CPU} --sizes 4K,,8K", "'' ... size"),
    (f"{CPU} --sizes 100", "of 100 bytes ... of 8"),
    (f"{CPU} --counts 17", "17 runs ... even number ... give"),
    (f"{CPU} --directions up", "'up' ... unknown direction ... expected one"),
    (f"{CPU} --directions ''", "directions ... empty"),
    (f"{CPU} --hosts here", "'here' ... unknown host ... expected one"),
    (f"{CPU} --paths warp", "'warp' ... on 1 thread"),
    (f"{CPU} --beside decode", "GPU ... measured beside ... compute"),
    (f"{CPU} --seconds -1", "seconds ... is -1.0 ... above 0"),
    (f"{CPU} --seconds soon", "'soon' ... invalid float ... argument"),
    (f"{CPU} --memory 4", "into 4 ... nothing fits"),
    (f"{CPU} --plot made.pdf", "'made.pdf' ... argument ... does not"),
    (f"{CPU} --plot nowhere/made.svg", "'nowhere/made.svg' ... such file ... directory"),
    (f"{CPU} --output nowhere/made.json", "'nowhere/made.json' ... such file ... directory"),
    ("bench --device gpu", "'gpu' ... GPU ... 0"),
    ("bench --device cuda:99", "cuda"),
    (f"{CPU} --peer cpu", "'cpu' ... GPU ... 0"),
    (f"{CPU} --beside-on peer", "'peer' ... expected one of device"),
    (f"{CPU} --peer process --paths host", "peer process ... paths does"),
    (f"{CPU} --peer process --beside-on peer", "peer process ... does not"),
    (f"{CPU} --peer process:cpu", "'cpu' ... GPU ... 0"),
    (f"{CPU} --peer process:cuda:1", "'cpu' ... 'cuda:1' ... GPUs ... CPU"),
]
PLACES = ("", "@", "16@", "@16", "x", "1.5", "0@4096", "16 @4096", "16@4096@1", "9" * 19, "1@0xffffffffffffffff", "0xg")
REFUSED["which", lambda text: command("which", text, GPU), UsageError] = [
    (text, "BYTES@ADDRESS ... 16@0x7f0000002000") for text in PLACES
]
AXES = "axes are layer, kv, block, token, subblock, head, dim"
REFUSED["inspect NOTATION", lambda text: command("inspect", text, "--sizes", "layer=1"), UsageError] = [
    ("layer: blok dim", f"unknown axis 'blok' ... {AXES} ... column 8: layer: ^blok dim ... an example is"),
    ("block (token dim", "never closed ... column 7: block ^(token dim"),
    ("block\ttoken\x1b[31m dim", "'\\x1b' ... column 12: block token^ [31m dim"),
    (" " * 100 + "heads " + " " * 100 + "dim", "'heads' ... column 101: ... ^heads ..."),
]
REFUSED["explain FILE", lambda content: command("explain", GPU, file(content, "a.toml")), UsageError] = [
    ('notation = "layer: blok dim"\nsizes = {}', "a.toml: unknown axis 'blok' ... column 8: layer: ^blok dim"),
    ("notation = ", "a.toml ... is not TOML"),
    ('notation = "block dim"', "a.toml ... needs 'sizes'"),
    ('notation = "block dim"\nsizes = {block = 4, dim = 8}\nstrides = [4, 1]', "a.toml ... overlaps itself"),
    (b"\xff\xfe", "cannot read the spec ... a.toml"),
]


def config(content):
    return command("inspect", "--config", file(content, "config.json"))


PLAIN = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512}
MLA = {"kv_lora_rank": 8, "qk_rope_head_dim": 8, "index_head_dim": 8}
LINEAR = {"layer_types": ["linear_attention"] * 4}
MAMBA = PLAIN | dict(mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=32, mamba_d_conv=4)
NEMOTRON = PLAIN | dict(model_type="nemotron_h", mamba_num_heads=8, mamba_head_dim=16, n_groups=1, conv_kernel=4)
NEMOTRON |= {"head_dim": 16, "ssm_state_size": 32}
UNKNOWN = """
attention_chunk_size attention_k_eq_v attention_types attn_type_list block_configs block_types compress_rates
compress_ratios conv_L_cache cross_attention_layers global_head_dim hybrid_layer_ids hybrid_layer_pattern
hybrid_override_pattern is_encoder_decoder layer_group_size layers_block_type linear_attn_config mamba_n_heads
mamba_num_heads multi_query new_decoder_architecture num_global_key_value_heads num_kv_shared_layers ssm_state_size
swa_num_key_value_heads
"""
REFUSED["inspect --config", config, UsageError] = [
    (b"\xff", "cannot read ... config"),
    (b"{", "JSON"),
    (b"[]", "holds ... list"),
    (b"{}", "config.json: 'num_hidden_layers' is missing"),
    ({"text_config": "x" * 10**6}, "text_config"),
    ({"text_config": {"model_type": "a new one"}}, "'text_config' ... 'num_hidden_layers' is missing"),
    ({"text_config": {"text_config": {"text_config": {}}}}, "'num_hidden_layers' is missing"),
    (MAMBA | {"model_type": "bamba"}, "bamba ... no layer with attention"),
    (MAMBA | {"model_type": "bamba", "attn_layer_indices": [4]}, "'attn_layer_indices' ... [4]"),
    (MAMBA | {"model_type": "falcon_h1", "mamba_d_head": None}, "'mamba_d_head' ... missing"),
    (NEMOTRON, "which layers ... state ... 'hybrid_override_pattern'"),
    (NEMOTRON | {"hybrid_override_pattern": "M*"}, "'hybrid_override_pattern' ... 'M*' ... of 4, one per layer"),
    (NEMOTRON | {"hybrid_override_pattern": "M*X-"}, "'hybrid_override_pattern' ... 'X'"),
]
REFUSED["inspect --config", lambda change: config(PLAIN | change), UsageError] = [
    *[({key: 3}, f"'{key}' is 3, which changes what the cache holds") for key in UNKNOWN.split()],
    ({"num_hidden_layers": None}, "'num_hidden_layers' ... from 1"),
    ({"num_hidden_layers": True}, "'num_hidden_layers' ... True"),
    ({"num_hidden_layers": 5_000_000}, "is 5000000 ... from 1 ... 4096"),
    ({"num_hidden_layers": 2**64, "full_attention_interval": 4}, "of 65 bits ... number"),
    ({"num_key_value_heads": [2, 2]}, "'num_key_value_heads' ... [2, 2]"),
    ({"num_key_value_heads": list(range(99))}, "of 99 ... list"),
    ({"hidden_size": 500}, "'hidden_size' ... 500 ... of 8 heads"),
    ({"v_head_dim": 32}, "'v_head_dim' ... is 32 ... has 64"),
    ({"sliding_window": 16}, "'layer_types' ... 'sliding_window_pattern'"),
    ({"sliding_window": 9, "use_sliding_window": True, "max_window_layers": "2"}, "'2'"),
    ({"layer_types": ["full_attention"]}, "it ... of 4, one"),
    ({"layer_types": ["chunked_attention"] * 4}, "'attention_chunk_size' is missing"),
    ({"layer_types": ["sliding_attention"] * 4}, "'sliding_window' ... missing"),
    ({"layer_types": [["full_attention"]] * 4}, "'layer_types' ... ['full_attention']"),
    (LINEAR, "hold a state ... not known ... spec"),
    (MLA | LINEAR, "hold a state ... not known ... spec"),
    (MLA | {"sliding_window": 16}, "'sliding_window' is 16 ... 'layer_types'"),
    (MLA | {"indexer_types": ["full", "shared"]}, "'indexer_types' ... 'shared'"),
    (MLA | {"indexer_types": 3}, "'indexer_types' ... is 3 ... of 4, one"),
    (MLA | {"indexer_types": [["full"]]}, "'indexer_types' ... ['full']"),
    ({"model_type": "jamba", "attn_layer_period": 8, "attn_layer_offset": "4"}, "'attn_layer_offset'"),
    ({"head_dim": 2**40}, "'head_dim' ... is 1099511627776"),
    ({"text_config": 3}, "text_config ... is 3"),
]
