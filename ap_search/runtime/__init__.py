"""Execute a plan small: a toy transformer of a model's own sizes under a plan's axes, on gloo or NCCL processes.

The only part of the package that imports torch (extra `runtime`); this module and `settings` and `support` do not.

What does what, bottom to top:

- `settings`: what a run fixes beside model and plan. `support`: what the runtime refuses, by name.
- `collectives`: collectives with their autograd mirror, each labelled dispatch, combine, tp or dp.
- `meshes`: process groups and device meshes of a plan, from the rank groups that price it.
- `cuts`: parameters that know which slice of the whole tensor they are; deterministic initial values.
- `functions`: norms, SwiGLU, rotary positions, the router's product: they save what the memory model says is saved.
- `tensor`: column- and row-parallel products, with sequence parallelism or not; cross-entropy over a split vocabulary.
- `rows`: taking rows and summing them back in one fixed order, so that all dispatchers agree bit for bit.
- `routing`, `capacity`: scores, top-k, group limits; dropping and padding to capacity.
- `dispatch`: `DispatchContext` and the protocol; `dispatch_alltoall`, `dispatch_allgather`, `dispatch_dedup`.
- `experts`, `moe`, `attention`, `feed_forward`, `transformer`: the modules. `styles`: what cuts them over a mesh.
- `replicated` (no sharding, ZeRO-1, ZeRO-2) and `sharded` (ZeRO-3 and HSDP by FSDP2): gradients, optimizer, state.
- `pipeline`: GPipe, 1F1B and interleaved 1F1B over torch.distributed.pipelining.
- `state`: what both do. `hook_order`: in which order FSDP and dispatch act, observed.
- `batch`, `execute`: one training step of a plan on this rank. `reference`: the same step in one process.
"""
