"""The tests' own data: what `planted_schema` describes, beside `titanlab.data.source`."""

import itertools
import os
import signal
import time
from pathlib import Path

from tests.launch import holds
from tests.planted_schema import Planted
from titanlab.data import Synthetic
from titanlab.data.contract import IGNORE, DataSource
from titanlab.data.indexed import rank_samples
from titanlab.data.synthetic import SyntheticSource

HOLD = os.environ.get("HOLD", "")
holds.install(HOLD)


class PlantedSource(DataSource):
    def __init__(self, config: Planted):
        self.config = config
        self.plain = SyntheticSource(Synthetic(vocab_size=config.vocab_size))

    def fingerprint(self):
        return f"planted-{self.config.vocab_size}-{self.config.gaps}"

    def prepare(self, *, report):
        config, launcher = self.config, "TITANLAB_PARENT" not in os.environ
        if launcher and os.environ.get("RANK") == "0":
            time.sleep(config.late)
        if not launcher and config.fault == "raise" and config.step == 0 and os.environ["RANK"] == str(config.rank):
            raise LookupError("a planted fault")

    def tokenizer(self):
        return None

    def vocab_size(self):
        return self.config.vocab_size

    def open_train(self, **how):
        return PlantedStream(self.config, self.plain.open_train(**how), **how)

    def open_validation(self, **how):
        return self.plain.open_validation(**how)


class PlantedStream:
    def __init__(self, config: Planted, inner, *, global_batch, rank, ranks, **_):
        self._inner = inner
        self._config, self._rank, self._ranks, self._global_batch = config, rank, ranks, global_batch

    def next_batch(self):
        begin = self._inner.state()["samples"]
        batch = self._inner.next_batch()
        if self._config.gaps:
            mine = rank_samples(begin, global_batch=self._global_batch, rank=self._rank, ranks=self._ranks)
            for labels, sample in zip(batch.labels, mine, strict=True):
                labels[: len(labels) * (sample % 4) // 3] = IGNORE
        time.sleep(self._config.seconds)
        if begin // self._global_batch + 1 == {"compile": 1, "step": 4}.get(HOLD):
            holds.wait()
        rank = int(os.environ["RANK"]) if self._config.where else self._rank
        if (begin // self._global_batch + 1, rank) == (self._config.step, self._config.rank):
            if self._config.where in ("forward", "backward"):
                self._fail_inside()
            else:
                self._fail()
        return batch

    def _fail(self, *_):
        fault = self._config.fault
        if self._config.attempt and os.environ.get("TITANLAB_ATTEMPT") != str(self._config.attempt):
            return
        if self._config.where:
            # Beside the folder of runs; tests compare it with when all was over.
            Path("died").write_text(str(time.time()))
        if fault == "raise":
            raise LookupError("a planted fault")
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "exit":
            os._exit(self._config.code)
        elif fault == "hang":
            time.sleep(3600)
        elif fault == "loop":
            while True:
                pass
        elif fault in COLLECTIVE_FAULTS:
            COLLECTIVE_FAULTS[fault]()
        elif fault == "memory":
            import torch

            # Only under a limit does it come to an end: what nobody has written to takes no memory.
            held = [torch.empty(1 << 28, dtype=torch.uint8) for _ in range(256)]
            raise AssertionError(f"there is no limit: {len(held)} tensors of 256 MiB")
        elif fault == "fill":
            # In 3 s a GiB and a half, which is then given back: somebody has to look.
            held = [(bytearray(os.urandom(1 << 20) * 50), time.sleep(0.1)) for _ in range(30)]
            raise AssertionError(f"nobody minded {len(held)} times 50 MiB")
        elif fault:
            os.kill(os.getpid(), signal.Signals[fault])

    def _fail_inside(self):
        """In the midst of the step that begins now, when others wait for this rank."""
        from titanlab.techniques.model import llama

        whole, calls = llama.FeedForward.forward, itertools.count(1)

        def forward(module, *inputs):
            output = whole(module, *inputs)
            if next(calls) == 2:
                if self._config.where == "forward":
                    self._fail()
                else:
                    output.register_hook(self._fail)
            return output

        llama.FeedForward.forward = forward

    def state(self):
        return self._inner.state()

    def close(self):
        self._inner.close()


def _other_all_reduce(replace):
    """The next all-reduce of this process is another one."""
    import torch.distributed as dist

    usual = dist.all_reduce

    def other(tensor, *arguments, **named):
        dist.all_reduce = usual
        return replace(usual, tensor, *arguments, **named)

    dist.all_reduce = other


def _skip_all_reduce():
    _other_all_reduce(lambda usual, tensor, *arguments, **named: None)


def _other_shape():
    _other_all_reduce(lambda usual, tensor, *arguments, **named: usual(tensor.repeat(2), *arguments, **named))


def _skip_recv():
    import torch

    from titanlab.parallelism.pipeline_stage import ScheduledStage

    usual = ScheduledStage.get_fwd_recv_ops

    def skip(stage, microbatch):
        ScheduledStage.get_fwd_recv_ops = usual
        stage._arrived[microbatch] = torch.zeros(stage._shape, dtype=stage._dtype), None
        return []

    ScheduledStage.get_fwd_recv_ops = skip


def _other_order():
    """This process calls a collective of all ranks while its peers are in one of a smaller group."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(3))


COLLECTIVE_FAULTS = {
    "skip": _skip_all_reduce,
    "shape": _other_shape,
    "skip_recv": _skip_recv,
    "order": _other_order,
}
