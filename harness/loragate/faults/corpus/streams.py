"""Faults of forks, joins and of what streams share."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group

_streams = planting("lorakernels.runtime.streams", Group.STREAMS)
_linear = planting("lorakernels.dense.linear", Group.STREAMS)
_ops = planting("lorakernels.dense.ops", Group.STREAMS)
_options = planting("lorakernels.runtime.options", Group.STREAMS)
_metadata = planting("lorakernels.batch.metadata", Group.STREAMS)
_prepare = planting("lorakernels.batch.kernels", Group.STREAMS)

_JOIN = "        for end in ends:\n            current.wait_event(end)\n"
_END = """                finally:
                    end.record(stream)
                    ends.append(end)
"""
_MAIN = "        return _call_in(here.part(claims, 0, here.number), main)\n"
_FORKED = (
    "        out = fork_join(device, base, *beside, partial(delta.shrink, pdl=False), "
    "parallel=parallel)\n"
)
_EXPAND = "    delta.expand(out, pdl=pdl, behind_base=form is not LinearForm.SINGLE)\n"
_FORK = f"{_FORKED}{_EXPAND}"
_SHRINK = """    def shrink(self, *, pdl: bool) -> None:
        launch_shrink(self.x, self.slots, self.shape, self.tiles, self.shrunk, pdl=pdl)
"""
_BASE = """    def base() -> Tensor:
        return F.linear(x, weight, bias)
"""

FAULTS = (
    _streams(
        "side-does-not-wait-for-the-fork",
        "                stream.wait_event(start)\n",
        "",
        source="sglang #26380",
        why="A side reads the input and the mapping while they are still being written.",
    ),
    _streams(
        "fork-event-is-never-recorded",
        "    start.record(current)\n",
        "",
        source="vllm #35721",
        why="A wait for an event that nothing has recorded does not wait.",
    ),
    _streams(
        "fork-event-recorded-on-the-side",
        "                stream.wait_event(start)\n",
        "                start.record(stream)\n                stream.wait_event(start)\n",
        source="vllm #35721",
        why="A side waits for itself, as the event was recorded on its own stream.",
    ),
    _streams(
        "join-is-missing",
        _JOIN,
        "        del ends\n",
        source="vllm #35721",
        why="The expand adds what the side may not have computed yet.",
    ),
    _streams(
        "end-recorded-outside-the-side",
        _END,
        "                finally:\n"
        "                    ends.append(end)\n"
        "            end.record(current)\n",
        source="vllm #35721",
        why="The end of a side is recorded behind its scope, on the stream that waits for it.",
    ),
    _streams(
        "end-recorded-before-the-work",
        """                try:
                    _call_in(here.part(claims, part, number), side)
                finally:
                    end.record(stream)
                    ends.append(end)
""",
        """                end.record(stream)
                ends.append(end)
                _call_in(here.part(claims, part, number), side)
""",
        source="local-inference-lab #93",
        why="The join waits for an event that does not follow the work of the side.",
    ),
    _streams(
        "join-waits-on-the-side",
        _JOIN,
        "        for end in ends:\n            stream.wait_event(end)\n",
        source="vllm #35721",
        why="The side waits for its own end, and the main stream for nothing.",
    ),
    _streams(
        "join-of-the-last-side-only",
        _JOIN,
        "        for end in ends[-1:]:\n            current.wait_event(end)\n",
        source="sglang #28091",
        why="With several sides only the last one is waited for.",
    ),
    _streams(
        "one-end-for-all-sides",
        "                end = module.Event()\n",
        "                end = ends[0] if ends else module.Event()\n",
        source="vllm #36795",
        why="Two sides record one event: the join waits for the second record twice.",
    ),
    _streams(
        "main-joins-before-its-own-work",
        _MAIN,
        f"        for end in ends:\n            current.wait_event(end)\n{_MAIN}",
        source="vllm #34933",
        why="A wait that serialises everything: the base product starts when the side is done.",
        only=True,
    ),
    _streams(
        "side-waits-for-the-work-of-main",
        "    start.record(current)\n",
        "    done = _call_in(here, main)\n    main = lambda: done\n    start.record(current)\n",
        source="vllm #34933",
        why="The fork is behind the base product, so that the side never runs beside it.",
    ),
    _streams(
        "side-runs-on-the-main-stream",
        "            with module.stream(stream):\n",
        "            with module.stream(current):\n",
        source="vllm #34933",
        why="The side waits and records on its stream, but its work is queued on the main one.",
    ),
    _streams(
        "never-forked",
        "    module = stream_module(device) if parallel and sides else None\n",
        "    module = stream_module(device) if parallel and len(sides) > 1 else None\n",
        source="vllm #34933",
        why="A fork with a single side silently runs on one stream.",
    ),
    _linear(
        "expand-beside-the-base-product",
        _FORK,
        "        out = torch.empty_like(base())\n"
        "        fork_join(device, lambda: out.copy_(base()), *beside, "
        "lambda: (delta.shrink(pdl=False), delta.expand(out, pdl=False, behind_base=True)), "
        "parallel=parallel)\n"
        "        return out\n"
        f"{_EXPAND}",
        source="vllm #35721",
        why="Both streams write the output: the base product erases the delta, or does not.",
    ),
    _linear(
        "delta-materialised-uninitialised",
        _FORK,
        f"{_FORKED}"
        "        extra = torch.empty_like(out)\n"
        "        delta.expand(extra, pdl=pdl, behind_base=True)\n"
        "        return out.add_(extra)\n"
        f"{_EXPAND}",
        source="vllm #29316",
        why="Rows without an adapter get what the memory of the delta held before.",
    ),
    _linear(
        "input-copy-freed-while-the-side-reads",
        _SHRINK,
        "    def shrink(self, *, pdl: bool) -> None:\n"
        "        wide = self.x.clone()\n"
        "        with torch.cuda.stream(torch.cuda.Stream()):\n"
        "            launch_shrink(wide, self.slots, self.shape, self.tiles, self.shrunk, "
        "pdl=pdl)\n"
        "        del wide\n",
        source="local-inference-lab #93",
        why="A copy of the input returns to the allocator while a stream of the shrink reads it.",
    ),
    _linear(
        "input-scaled-in-place-by-main",
        _BASE,
        "    def base() -> Tensor:\n"
        "        out = F.linear(x.mul_(2), weight, bias)\n"
        "        x.mul_(0.5)\n"
        "        return out.sub_(bias if bias is not None else 0).mul_(0.5)"
        ".add_(bias if bias is not None else 0)\n",
        source="sglang #31870",
        why="Write after read: the main stream changes the input that the side still reads.",
    ),
    _linear(
        "output-of-the-base-allocated-on-the-side",
        _FORK,
        "        made = []\n"
        "        fork_join(device, partial(delta.shrink, pdl=False), *beside, "
        "lambda: made.append(base()), parallel=parallel)\n"
        "        out = made[0]\n"
        f"{_EXPAND}",
        source="local-inference-lab #93",
        why="The output belongs to the side stream, which reuses its memory beside its readers.",
        only=True,
    ),
    _linear(
        "shrink-output-allocated-on-the-side",
        "        launch_shrink(self.x, self.slots, self.shape, self.tiles, self.shrunk, pdl=pdl)\n",
        "        part = torch.empty_like(self.shrunk)\n"
        "        launch_shrink(self.x, self.slots, self.shape, self.tiles, part, pdl=pdl)\n"
        "        object.__setattr__(self, 'shrunk', part)\n",
        source="local-inference-lab #93",
        why="What a side allocates leaves it: freed, it is reused beside the expand that reads it.",
    ),
    _linear(
        "all-base-decides-the-fork-the-wrong-way",
        "        parallel = form is LinearForm.DUAL\n",
        "        parallel = form is LinearForm.DUAL and not runs_adapters(\n"
        "            delta.tiles.tile_rows, device\n"
        "        )\n",
        source="vllm #15090",
        why="Batches with adapters run on one stream, as only those without should.",
    ),
    _linear(
        "form-ignored",
        "        parallel = form is LinearForm.DUAL\n",
        "        parallel = form is LinearForm.AHEAD\n",
        source="vllm #34933",
        why="The dual form runs on one stream.",
    ),
    _metadata(
        "capability-probed-once",
        "        self._note_adapters(may_have)\n",
        "        self._step.base_rows = BaseRows()\n",
        source="vllm #42008",
        why="Whether a batch has adapters is remembered from the time when none was known.",
    ),
    _metadata(
        "capability-of-the-step-before",
        "        self._note_adapters(may_have)\n",
        "        self._note_adapters(getattr(self, 'had', False))\n        self.had = may_have\n",
        source="vllm #42008",
        why="A step forks as the step before should have.",
    ),
    _metadata(
        "mapping-staged-in-one-host-buffer",
        """        if token_slots.device != self.token_slots.device:
            token_slots = upload(token_slots, self.token_slots.device)
""",
        """        if token_slots.device.type == "cpu":
            device, pinned = self.token_slots.device, self.token_slots.is_cuda
            if not hasattr(self, "staged"):
                self.staged = torch.empty(self.max_tokens, dtype=torch.int32, pin_memory=pinned)
            self.staged.numpy()[:num_live] = token_slots.numpy()
            token_slots = self.staged[:num_live].to(device, non_blocking=True)
""",
        source="vllm #42120",
        why="The host fills its buffer for the next step while the copy of this one is queued.",
        only=True,
    ),
    _prepare(
        "first-program-clears-the-rows-of-all",
        "    own_rows_ptr = tile_rows_ptr + first_tile * HEIGHT\n",
        """    own_rows_ptr = tile_rows_ptr + first_tile * HEIGHT
    if slot == 0:
        for start in range(0, size_tile_rows, BLOCK):
            tl.store(tile_rows_ptr + start + lanes, nothing, mask=start + lanes < size_tile_rows)
        tl.debug_barrier()
""",
        source="own",
        why="Programs that run earlier than the first one lose their rows.",
        only=True,
    ),
    _prepare(
        "a-slot-clears-one-tile-too-many",
        "mask=count + lanes < own_tiles * HEIGHT)",
        "mask=count + lanes < tl.minimum(own_tiles + 1, num_tiles - first_tile) * HEIGHT)",
        source="own",
        why="A program erases the first tile of the next slot, if that one was there before it.",
    ),
    _streams(
        "nested-sides-share-a-stream",
        "    while stream is None or stream in tree.streams:\n",
        "    while stream is None:\n",
        source="own",
        why="A stream that torch hands out twice makes two sides run one after the other.",
    ),
    _streams(
        "branches-share-a-number",
        "    number = len(tree.streams)\n",
        "    number = min(len(tree.streams), 1)\n",
        source="sglang #28091",
        why="All sides of a fork use the stream and the buffer of the first one.",
    ),
    _streams(
        "shared-buffers-are-not-refused",
        "        if owner != part:\n",
        "        if owner > part:\n",
        source="sglang #21647",
        why="Two parts of a fork write one scratch buffer, and nothing says so.",
    ),
    _streams(
        "capture-is-not-noticed",
        "        return bool(module.is_current_stream_capturing())\n",
        "        return False\n",
        source="vllm #15090",
        why="A graph that is captured with base rows alone has no fork for other batches.",
    ),
    _ops(
        "branches-share-a-buffer",
        "    return buffers[number]\n",
        "    return buffers[0]\n",
        source="sglang #28091",
        why="Two branches of a fork write their shrink outputs over each other.",
    ),
    _linear(
        "expand-trusts-a-shrink-of-another-stream",
        _EXPAND,
        "    delta.expand(out, pdl=pdl, behind_base=False)\n",
        source="vllm #31777",
        why="Behind the base product, the expand reads the output before that product is done.",
    ),
    _options(
        "switch-read-once",
        '    value = os.environ.get(DUAL_STREAM, "0")\n',
        '    value = globals().setdefault("_SWITCH", os.environ.get(DUAL_STREAM, "0"))\n',
        source="vllm #39804",
        why="A switch that changes while the process runs has no effect.",
    ),
    _options(
        "switch-not-refused-without-streams",
        '    if value == "1" and streams.stream_module(device) is None:\n',
        '    if value == "1" and device.type == "meta":\n',
        source="vllm #37427",
        why="A platform without streams takes the switch and silently runs without.",
    ),
    _linear(
        "mapping-tables-cleared-by-main",
        _BASE,
        "    def base() -> Tensor:\n"
        "        kept = num_tiles.clone()\n"
        "        num_tiles.zero_()\n"
        "        out = F.linear(x, weight, bias)\n"
        "        num_tiles.copy_(kept)\n"
        "        return out\n",
        source="sglang #26380",
        why="The main stream uses a table of the step as scratch while the side reads it.",
    ),
    _linear(
        "shrink-output-cleared-by-main",
        _BASE,
        "    def base() -> Tensor:\n"
        "        shrunk[0].zero_()\n"
        "        return F.linear(x, weight, bias)\n",
        source="vllm #35721",
        why="The workspace is cleared on the main stream while the side writes it.",
    ),
)
