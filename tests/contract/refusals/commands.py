"""Refusals of the command line's arguments: one line on stderr, nothing on stdout, exit status 2."""

from __future__ import annotations

from tests.commands import GPU, HOST, ROOT
from tests.contract.refusals.table import UsageError, command, file, rows

TOKENS = "block token dim"
TOKENS_SIZES = ("--sizes", "block=4,token=4,dim=8")
ROWS = rows(
    "python -m kvplan",
    lambda argv: command(*argv),
    UsageError,
    [
        ([], "COMMAND ... 'kvplan --help'"),
        (["--json"], "COMMAND ... arguments are ... required"),
        (["inspekt"], "'inspekt' ... invalid choice"),
        (["inspect"], "SPEC ... 'kvplan inspect --help'"),
        (["inspect", GPU, "--jso"], "'kvplan inspect --help' ... unrecognized arguments"),
        (["inspect", "nowhere.toml"], "'nowhere.toml' ... cannot read ... such file"),
        (["inspect", "/dev/null"], "'/dev/null' ... cannot read ... device"),
        (["explain", GPU, HOST, "--blocks", "5000"], "block 5000 ... are 0 ... 1023"),
        (["explain", GPU, HOST, "--blocks", "0", "--dst", "5000"], "block 5000 ... names"),
        (["inspect", GPU, "--json", "--svg", ""], "'' ... written ... cannot"),
        (["explain", GPU, HOST, "--svg", "nowhere/made.svg"], "'nowhere/made.svg' ... written ... cannot"),
        (["report", GPU, "--output", ""], "'' ... written ... output"),
        (["inspect", GPU, "--block", "1024"], "--block 1024 ... are 0 to 1023"),
        (["inspect", GPU, "--block=-1"], "'-1' ... whole number of at least 0"),
        (["inspect", GPU, "--picture", "--json"], "--picture draws in the terminal"),
        (["inspect", GPU, "--svg", "nowhere/made.svg"], "'nowhere/made.svg' ... written ... cannot"),
        (["inspect", str(ROOT)], "directory"),
        (["inspect", str(ROOT / "pyproject.toml")], "pyproject.toml ... 'build-system'"),
        (["inspect", GPU, "--dtype", "int8"], "dtype goes ... notation"),
        (["inspect", TOKENS], "sizes['block'] ... [] ... block=EXTENT"),
        (["inspect", TOKENS, *TOKENS_SIZES, "--dtype", "int3"], "'int3' ... unknown ... dtype"),
        (["inspect", TOKENS, "--sizes", "block"], "'block' ... AXIS=EXTENT ... layer=80 ... block=1024"),
        (["inspect", TOKENS, "--sizes", "block=1,block=2"], "'block' ... given twice"),
        (["inspect", TOKENS, "--sizes", "block=4,token=4,dim=8,head=2"], "'head' ... sizes name"),
        (["explain", GPU, HOST, "--sizes", "block=4"], "sizes goes ... notation"),
        (["explain", GPU, HOST, "--dst-device", "cpu"], "device goes ... notation"),
        (["explain", GPU], "DST ... arguments are ... required"),
        (["plan", GPU, HOST, "--src", "0"], "arguments are ... required"),
        (["plan", GPU, HOST, "--src", "3-1", "--dst", "0"], "'3-1' ... in 0,1,4 ... -7"),
        (["plan", GPU, HOST, "--src", "0,,1", "--dst", "0"], "'' ... '0,,1'"),
        (["plan", GPU, HOST, "--src", "-1", "--dst", "0"], "--src"),
        (["plan", GPU, HOST, "--src", "9" * 30, "--dst", "0"], "block"),
        (["plan", GPU, HOST, "--src", "0-999999999999", "--dst", "0"], "block 999999999999 ... blocks there ... names"),
        (["plan", GPU, HOST, "--src", "0", "--dst", "1024"], "are 0 ... 1023"),
        (["plan", GPU, HOST, "--src", "0,1", "--dst", "1"], "2 src ... cover 2 units"),
        (["plan", GPU, HOST, "--src", "0,1", "--dst", "1,1"], "more than ... once"),
        (["plan", GPU, HOST, "--src", "0", "--dst", "1", "--src-skip", "1"], "src_skip ... is 1"),
        (["plan", GPU, HOST, "--src", "0", "--dst", "1", "--src-skip", "x"], "'x' ... least 0"),
        (["plan", GPU, HOST, "--src", "0", "--dst", "1", "--max-bytes", "0"], "max_nbytes ... is 0"),
        (["plan", GPU, HOST, "--src", "0", "--dst", "1", "--limit", "some"], "'some' ... least 0"),
        *[
            (["plan", GPU, HOST, "--src", "0", "--dst", "1", "--max-bytes", text], "max")
            for text in ("-1", "1.5", "9" * 5000)
        ],
        (["plan", GPU, GPU, "--src", "9" * 5000, "--dst", "0"], "block id"),
        (["diff", GPU, HOST], "'diff' is now 'kvplan explain SRC DST'"),
        (["explain", GPU, HOST, "--change", "C"], "--change ... 'C' ... choice"),
        (["explain", GPU, HOST, "--change", ""], "--change ... choice"),
        *[
            (["doctor", "--device", text], f"--device ... {text!r} ... as in cuda:0")
            for text in ("cpu", "cuda:", "cuda:x", "0", "")
        ],
        *[
            (["demo", "--engine", "numpy", "--requests", text], f"--requests ... {text!r} ... at least 1")
            for text in ("0", "-1", "x")
        ],
        *[(["demo", "--engine", "numpy", option, "9" * 18], option) for option in ("--requests", "--tokens")],
        (["x" * 5000], "'xxx"),
        (["inspect", GPU, "--" + "x" * 5000], "--xxx"),
        (["bench", "--device", "x" * 5000], "'xxx"),
        (["pairs", "--host", "zzz"], "zzz ... page-first"),
        (["pairs", "--device", "zzz"], "zzz ... vllm-split-kv"),
        (["explain", GPU, HOST, "--blocks", "0", "--profile", "zzz"], "zzz ... default"),
        (["explain", GPU, HOST, "--blocks", "0", "--overlap", "odd"], "overlap 'odd' ... decode"),
    ],
)
PLACES = [
    "",
    "@",
    "16@",
    "@16",
    "x",
    "0x",
    "1.5",
    "0@4096",
    "16 @4096",
    "16@4096@1",
    "9" * 19,
    "1@0xffffffffffffffff",
    "0xg",
]
ROWS += rows(
    "which",
    lambda text: command("which", text, GPU),
    UsageError,
    [(text, "BYTES@ADDRESS ... 16@0x7f0000002000") for text in PLACES],
)
ROWS += rows(
    "report",
    lambda argv: command("report", *argv),
    UsageError,
    [
        ((GPU, "--output", "/proc/nope/page.html"), "written ... cannot"),
        ((GPU, "--blocks", "0-3", "--output", "page.html"), "blocks are for a plan ... give B"),
        ((GPU, HOST, "--blocks", "0", "--overlap", "odd", "--output", "page.html"), "'odd' ... unknown overlap"),
        ((GPU,), "output"),
        (("nowhere.toml", "--output", "page.html"), "nowhere.toml"),
    ],
)
ROWS += rows(
    "inspect --model",
    lambda argv: command("inspect", *argv),
    UsageError,
    [
        (["--model", "llama-3.1-80b"], "llama-3.1-8b, llama-3.1-70b"),
        (["--model", "?"], "known are llama-3.1-8b"),
        (["--model", "qwen3-8b", "--engine", "vlm"], "vlm ... vllm"),
        (["--model", "qwen3-8b", "--host", "?"], "there are ... page-first"),
        (["--model", "deepseek-v3", "--host", "page-first"], "'page-first' ... host layouts ... that are"),
        (["--model", "qwen3-8b", "--engine", "mla"], "mla caches"),
        (["--model", "deepseek-v3", "--engine", "transformers"], "transformers ... there are"),
        (["--model", "deepseek-v3", "--host", "block layer kv token head dim"], "kv axis"),
        (["--model", "qwen3-8b", "--host", "block layer token dim"], "kind mla"),
        (["--model", "qwen3-8b", "--host", "block kv token head dim"], "'layer' ... axis"),
        (["--model", "qwen3-8b", "--host", "block layer kv token head.0 head.1 dim"], "sizes['head.0']"),
        (["--model", "phi-3-medium", "--tp", "4"], "10 ... KV ... over 4 tensor"),
        (["--model", "qwen3-next-80b-a3b", "--tp", "32"], "32 tensor-parallel ranks"),
        (["--model", "qwen3-8b", "--tp", "0"], "'0' ... least 1"),
        (["--model", "qwen3-8b", "--dtype", "int3"], "'int3' ... unknown ... dtype"),
        (["--model", "qwen3-8b", "--link-gbps", "x"], "'x' ... GB ... above 0"),
        (["--model", "qwen3-8b", "--link-gbps", "nan"], "nan ... rate"),
        (["--model", "qwen3-8b", "--tokens", "1k,0"], "'0' ... number ... least 1"),
        (["--model", "qwen3-8b", "--config", "a.json"], "--config ... not allowed with"),
        (["--model", "qwen3-8b", "--sizes", "layer=1"], "unrecognized arguments: --sizes"),
        (["--config", "nowhere.json"], "'nowhere.json' ... cannot read ... config"),
        (["--config"], "--config"),
    ],
)
ROWS += rows(
    "bench",
    lambda argv: command("bench", "--device", "cpu", *argv),
    UsageError,
    [
        (("--sizes", "4X"), "'4X' ... in 512"),
        (("--sizes", "4K,,8K"), "'' ... size"),
        (("--sizes", "0"), "'0' ... size"),
        (("--sizes", "100"), "of 100 bytes ... of 8"),
        (("--counts", "1e3"), "'1e3' ... in 512"),
        (("--counts", "17"), "17 runs ... even number ... give"),
        (("--directions", "up"), "'up' ... unknown direction ... expected one"),
        (("--directions", ""), "directions ... empty"),
        (("--hosts", "here"), "'here' ... unknown host ... expected one"),
        (("--paths", "warp"), "'warp' ... on 1 thread"),
        (("--beside", "decode"), "GPU ... measured beside ... compute"),
        (("--seconds", "-1"), "seconds ... is -1.0 ... above 0"),
        (("--seconds", "soon"), "'soon' ... invalid float ... argument"),
        (("--memory", "4"), "into 4 ... nothing fits"),
        (("--plot", "made.pdf"), "'made.pdf' ... argument ... does not"),
        (("--plot", "nowhere/made.svg"), "'nowhere/made.svg' ... such file ... directory"),
        (("--output", "nowhere/made.json"), "'nowhere/made.json' ... such file ... directory"),
        (("--device", "gpu"), "'gpu' ... GPU ... 0"),
        (("--peer", "cpu"), "'cpu' ... GPU ... 0"),
        (("--beside-on", "peer"), "'peer' ... expected one of device"),
        (("--peer", "process", "--paths", "host"), "peer process ... paths does"),
        (("--peer", "process", "--beside-on", "peer"), "peer process ... does not"),
        (("--peer", "process:cpu"), "'cpu' ... GPU ... 0"),
        (("--peer", "process:cuda:1"), "'cpu' ... 'cuda:1' ... GPUs ... CPU"),
    ],
)
AXES = "axes are layer, kv, block, token, subblock, head, dim"
ROWS += rows(
    "inspect NOTATION",
    lambda text: command("inspect", text, "--sizes", "layer=1"),
    UsageError,
    [
        ("layer: blok dim", f"unknown axis 'blok' ... {AXES} ... column 8: layer: ^blok dim ... an example is"),
        ("block (token dim", "never closed ... column 7: block ^(token dim"),
        ("layer:", "no dims ... column 7: layer:^"),
        ("block token block", "block is named twice ... column 13: block token ^block"),
        ("block\ttoken\x1b[31m dim", "'\\x1b' ... column 12: block token^ [31m dim"),
        ("block " * 12 + "dim", "block is named twice ... column 7: block ^block"),
        (" " * 100 + "heads " + " " * 100 + "dim", "'heads' ... column 101: ... ^heads ..."),
    ],
)


def of_file(content, name="a.toml"):
    return command("explain", GPU, file(content, name))


ROWS += rows(
    "explain FILE",
    of_file,
    UsageError,
    [
        ('notation = "layer: blok dim"\nsizes = {}', "a.toml: unknown axis 'blok' ... column 8: layer: ^blok dim"),
        ("notation = ", "a.toml ... is not TOML"),
        ('notation = "block dim"', "a.toml ... needs 'sizes'"),
        ('notation = "block dim"\nsizes = {block = 0, dim = 2}', "a.toml ... at least 1"),
        ('notation = "block dim"\nsizes = {block = 4, dim = 8}\nstrides = [4, 1]', "a.toml ... overlaps itself"),
        (b"\xff\xfe", "cannot read the spec ... a.toml"),
        ("", "a.toml ... needs 'notation'"),
    ],
)
