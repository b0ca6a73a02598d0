"""The flags of the command line as data: placeholders, defaults, bounds, legal words, help."""

from ap_search.limits import (
    MAX_DEVICES,
    MAX_GIB,
    MAX_GLOBAL_BATCH,
    MAX_REDUNDANT_EXPERTS,
    MAX_SEED,
    MAX_SEQ_LEN,
    MAX_STEPS,
    MAX_TIMEOUT_S,
    MAX_TOP,
)

LOWEST = {"redundant_experts": 0, "seed": 0}
HIGHEST = {
    "devices": MAX_DEVICES,
    "global_batch": MAX_GLOBAL_BATCH,
    "seq_len": MAX_SEQ_LEN,
    "redundant_experts": MAX_REDUNDANT_EXPERTS,
    "top": MAX_TOP,
    "steps": MAX_STEPS,
    "seed": MAX_SEED,
    "timeout_s": MAX_TIMEOUT_S,
}
HIGHEST_FACTOR = {"capacity_factor": 65_536}
LOWEST_GIB = {"memory_limit_gib": "above 0", "reserve_gib": "0"}
HIGHEST_GIB = MAX_GIB
CHOICES = {
    "precision": ("bf16", "fp8", "mxfp8"),
    "target": ("any", "megatron", "torchtitan", "hyperparallel", "deepspeed"),
    "placement": ("contiguous", "eplb", "lplb", "ideal"),
    "only": ("moe", "dense"),
    "leave_out": ("group", "source", "model", "hardware"),
    "dtype": ("float32", "float64", "bfloat16"),
}
FILE_FLAGS = ("plot", "markdown", "json", "out", "software_out")
REQUIRED = {
    "model": "a preset's name (see ap-search models), a YAML, or a Hugging Face config.json",
    "devices": "",
    "plan": '"tp=2,pp=4,ep=8", or a plan\'s name as printed',
}

# Flag, placeholder (none for a switch), default, help.
JOB_FLAGS: tuple[tuple[str, str, str | None, str], ...] = (
    ("--model", "M", None, "preset name, YAML, or Hugging Face config.json (required)"),
    ("--devices", "N", None, "devices of the whole job (required)"),
    ("--cluster", "C", "h100-sxm", "preset name or YAML (h100-sxm, 8 devices per node)"),
    ("--global-batch", "B", None, "sequences per step (1024)"),
    ("--seq-len", "S", None, "tokens per sequence (4096)"),
    ("--precision", "P", None, "of the linear layers: bf16 fp8 mxfp8 (bf16)"),
    ("--set", "AXIS=V[,V...]", None, "fix an axis or knob, or give its candidates; repeatable"),
    ("--memory-limit-gib", "X", None, "GiB that one device may hold (the cluster's usable memory)"),
    ("--reserve-gib", "Y", None, "GiB of it kept free for context and communicators (the cluster's)"),
    ("--software", "S", "default", "profile of the trainer's software: what is fused and overlapped (default)"),
    ("--load", "L", "balanced", "tokens per expert: balanced, zipf:A, or a histogram in YAML/JSON/CSV/NPY (balanced)"),
    ("--placement", "W", "contiguous", "experts on ranks: contiguous eplb lplb ideal (contiguous)"),
    ("--redundant-experts", "R", "0", "copies of experts per MoE layer, for a placement that balances (0)"),
    ("--capacity-factor", "X", None, "token copies that an expert takes over its even share; the rest drop (dropless)"),
    ("--pad-to-capacity", "", None, "fill each expert's input up to its capacity: sizes are fixed, no stop to count"),
    ("--target", "T", "any", "framework that must run the plan: any megatron torchtitan hyperparallel deepspeed (any)"),
    ("--explain", "", None, "list communication groups and the steps of a MoE layer, for the first plan"),
    ("--top", "K", "10", f"plans shown, 1 to {MAX_TOP} (10)"),
    ("--json", "PATH", None, "write the machine-readable result to PATH; with - alone on stdout"),
)
PLAN_FLAG = ("--plan", "PLAN", None, "the plan: axes and knobs, or a name as printed (required)")

# Of `validate`: which runs, what else to write; and what a log does not say.
RUN_FLAGS: tuple[tuple[str, str, str | None, str], ...] = (
    ("--quality", "Q[,Q...]", None, "only runs of these grades, such as A,B"),
    ("--hardware", "H", None, "only runs whose cluster or device has this in its name"),
    ("--group", "G", None, "only runs of groups with this in their name"),
    ("--only", "KIND", None, "only these models: moe dense"),
    ("--source", "TEXT", None, "only runs whose source has this in it"),
    ("--software", "S", None, "one profile for all runs (each run's own, else the one that its source means)"),
    ("--best-plans", "", None, "search each ranked group's job: where does its best measured plan stand?"),
    ("--summary", "", None, "leave out the list of runs"),
    ("--plot", "PATH", None, "write measured against predicted as one HTML page"),
    ("--markdown", "PATH", None, "write the tables as Markdown, dated"),
    ("--json", "PATH", None, "write the machine-readable result to PATH; with - alone on stdout"),
    ("--template", "", None, "print an empty file of runs with comments, and end"),
    ("--megatron-log", "FILE", None, "compare with the log of one run, described by the flags below"),
    ("--model", "M", None, "its model: preset name, YAML, or Hugging Face config.json"),
    ("--devices", "N", None, "its devices"),
    ("--plan", "PLAN", None, "its plan: axes and knobs, or a name as printed"),
    ("--cluster", "C", None, "its cluster: preset name or YAML (h100-sxm)"),
    ("--global-batch", "B", None, "its sequences per step (the log's)"),
    ("--seq-len", "S", None, "its tokens per sequence (4096)"),
    ("--precision", "P", None, "of its linear layers: bf16 fp8 mxfp8 (bf16)"),
)
# Of `calibrate`: which runs, where to start, what to write; and what a log does not say.
CALIBRATE_FLAGS: tuple[tuple[str, str, str | None, str], ...] = (
    ("--runs", "FILE", None, "files of recorded runs, YAML, JSON or JSONL, or sets that ship; several may follow"),
    ("--cluster", "C", None, "cluster to start from: preset name or YAML (the one that the runs name)"),
    ("--software", "S", None, "profile to start from (the one that the runs name, else that their source means)"),
    ("--out", "PATH", None, "fit the cluster's constants, and write the whole cluster file"),
    ("--software-out", "PATH", None, "fit the profile's constants, and write the whole profile"),
    ("--leave-out", "UNIT", "group", "what is left out whole to judge the fit: group source model hardware (group)"),
    *(flag for flag in RUN_FLAGS if flag[0] in ("--quality", "--hardware", "--group", "--only", "--source")),
    ("--date", "D", None, "date that is written into the files (today)"),
    ("--json", "PATH", None, "write the machine-readable result to PATH; with - alone on stdout"),
    ("--megatron-log", "FILE", None, "set the level by the log of one run, described by the flags below"),
    *(
        flag
        for flag in RUN_FLAGS
        if flag[0] in ("--model", "--devices", "--plan", "--global-batch", "--seq-len", "--precision")
    ),
)

# Of `verify`: what is executed, and how.
VERIFY_FLAGS: tuple[tuple[str, str, str | None, str], ...] = (
    ("--devices", "N", None, "processes, one per device of the plan (required)"),
    PLAN_FLAG,
    ("--model", "M", "toy-moe", "preset name, YAML, or Hugging Face config.json of a small model (toy-moe)"),
    ("--steps", "K", "3", "training steps (3)"),
    ("--dtype", "T", "float32", "type in which results are compared: float32 float64 bfloat16 (float32)"),
    ("--global-batch", "B", None, "sequences per step (two micro-batches per pipeline stage)"),
    ("--seq-len", "S", "32", "tokens per sequence (32)"),
    ("--capacity-factor", "X", None, "token copies that an expert takes over its even share; the rest drop (dropless)"),
    ("--pad-to-capacity", "", None, "fill each expert's input up to its capacity"),
    ("--seed", "I", "0", "of weights and tokens (0)"),
    ("--timeout-s", "S", "300", "seconds that the run may take (300)"),
    ("--json", "PATH", None, "write the machine-readable result to PATH; with - alone on stdout"),
)
FLAGS = {
    "": JOB_FLAGS,
    "estimate": (PLAN_FLAG, *JOB_FLAGS),
    "validate": RUN_FLAGS,
    "calibrate": CALIBRATE_FLAGS,
    "verify": VERIFY_FLAGS,
}

AXES_AND_EXIT_CODES = """
axes and knobs of --set and --plan:
  tp           tensor parallel: splits heads and matrix widths
  cp           context parallel: splits the sequence
  pp, vpp      pipeline stages; virtual stages (model chunks) on each
  dp           data parallel: replicas of the dense layers; devices = dp*cp*tp*pp
  ep, etp      expert parallel; tensor parallel inside experts; devices = edp*ep*etp*pp
  mbs          sequences per micro-batch
  sharding     none | zero1 | zero2 | zero3 | hsdp
  recompute    none | full | selective:a+b
               of core_attn moe_act layernorm mla_up_proj mlp moe shared_experts
  dispatcher   allgather | alltoall | deepep | hybridep
  schedule     1f1b | interleaved | gpipe | zb_h1 | dualpipe
only in --plan:
  sp           0 switches sequence parallelism off (on where tp > 1)
  stage_layers layers per stage, such as 8x5+7x3; needed where the layers do not divide over the stages

exit codes: 0 found or feasible, 1 nothing feasible, 2 bad input (one line per fault on stderr)
"""

ABOUT = {
    "": """\
Which parallel strategy should train this model on this cluster? Prices every legal plan
in seconds and GiB, ranks them, and says why the others fell out.

commands:
  ap-search --model M --devices N       search (needs no more than this)
  ap-search estimate ... --plan PLAN    price one plan, feasible or not
  ap-search validate [RUNS ...]         price recorded runs, compare with what was measured
  ap-search calibrate --runs FILE ...   fit constants on recorded runs, write files to search with
  ap-search verify ... --plan PLAN      execute a plan small, compare with what is predicted
  ap-search models                      list model presets
  ap-search clusters                    list cluster presets
  ap-search software                    list software profiles""",
    "estimate": """\
Price one plan, feasible or not. Axes left out are 1 (etp included); dp, edp and the number of
micro-batches follow. Knobs left out: mbs=1, sharding=zero1, recompute=none, dispatcher=alltoall,
schedule=1f1b (interleaved when vpp > 1).""",
    "validate": """\
Price recorded runs with the plan that each states, and compare seconds and GiB with what was
measured: per run, source, hardware and kind of model, and the order inside groups. RUNS are
files of runs (ap-search validate --template prints one); the tool's own sets without any.""",
    "calibrate": """\
Fit the few constants of a cluster and of a software profile that recorded runs identify, judge them
on groups of runs that are left out, and write whole files for --cluster and --software. Constants that
the runs cannot tell stay as they are. Without --out and --software-out nothing is written.""",
    "verify": """\
Execute a plan small: one process per device (on GPUs where each has its own, else on CPUs), forward,
backward and update. Outputs, gradients and weights must equal those of one process on the same tokens,
bytes sent, kept and saved those that are predicted. Needs PyTorch: pip install "ap-search[runtime]".""",
    "models": "List the model presets: parameters in all and active for one token, layers, experts.",
    "clusters": "List the cluster presets: a device's memory and peak, its network in and beyond the scale-up domain.",
    "software": "List the profiles of trainers' software: what is fused, overlapped, captured in graphs.",
}
EXAMPLES = {
    "": """\
examples:
  ap-search --model deepseek-v3 --devices 256
  ap-search --model my/config.json --devices 512 --cluster h200-sxm --global-batch 4096 --seq-len 8192
  ap-search --model mixtral-8x7b --devices 64 --set ep=4,8 --set recompute=none --json result.json
"""
    + AXES_AND_EXIT_CODES,
    "estimate": """\
examples:
  ap-search estimate --model mixtral-8x7b --devices 64 --plan "tp=2,pp=4,ep=8"
  ap-search estimate --model qwen3-235b-a22b --devices 256 --plan "tp=2,pp=2,ep=32,recompute=full" --json -
"""
    + AXES_AND_EXIT_CODES,
    "validate": """\
examples:
  ap-search validate --summary
  ap-search validate my-runs.yaml --only moe --plot runs.html
  ap-search validate --megatron-log train.log --model qwen3-30b-a3b --devices 64 --plan "pp=4,ep=8"

exit codes: 0 runs were priced, 1 none could be, 2 bad input (one line per fault on stderr)
""",
    "calibrate": """\
examples:
  ap-search calibrate --runs my-runs.yaml --out cluster.yaml --software-out software.yaml
  ap-search calibrate --megatron-log train.log --model qwen3-30b-a3b --devices 64 --plan "pp=4,ep=8" \\
      --software-out software.yaml
  ap-search --model qwen3-30b-a3b --devices 64 --cluster cluster.yaml --software software.yaml

exit codes: 0 constants were adopted, 1 none: they would be no better on runs left out (no file is written),
2 bad input (one line per fault on stderr)
""",
    "verify": """\
examples:
  ap-search verify --devices 4 --plan "ep=2"
  ap-search verify --devices 8 --plan "pp=2,ep=2,sharding=zero3" --dtype float64 --json -
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29500 --rdzv-backend c10d \\
    -m ap_search verify --devices 16 --plan "tp=2,ep=8"

exit codes: 0 all checks hold, 1 one does not, 2 bad input, 70 a process failed (its traceback on stderr)
""",
}
