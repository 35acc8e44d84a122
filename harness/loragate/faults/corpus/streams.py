"""Faults of forks, joins and of what streams share."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group

_streams = planting("lorakernels.runtime.streams", Group.STREAMS)
_options = planting("lorakernels.runtime.options", Group.STREAMS)
_metadata = planting("lorakernels.batch.metadata", Group.STREAMS)
_prepare = planting("lorakernels.batch.kernels", Group.STREAMS)

_JOIN = "        for end in ends:\n            current.wait_event(end)\n"
_END = """                finally:
                    end.record(stream)
                    ends.append(end)
"""
_MAIN = "        return _call_in(here.part(claims, 0, here.number), main)\n"

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
)
