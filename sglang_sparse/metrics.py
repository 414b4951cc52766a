# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics with the prefix ``sglang_sparse:``, beside SGLang's own in ``/metrics``.

SGLang's ``--enable-metrics`` switches them on. They have the labels of its scheduler's metrics.
Counts are summed on the device and published at SGLang's decode logging interval. They are one
interval late, so that no step waits. When the server is idle, or asked for ``/server_info``, all
counts are published.
"""

from dataclasses import asdict
from typing import Any

from sglang_sparse import progress_log
from sglang_sparse.facts import Facts
from sglang_sparse.launch import selecting_launch_of

PREFIX = "sglang_sparse:"
# Buckets of the share of the visible KV that was attended to.
_SHARES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99)
# name -> (help, labels of its own)
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "decode_steps": ("Decode batches planned, by the variant that ran.", ("variant",)),
    "decode_rows": ("Rows (requests) of those batches.", ()),
    "dense_fallback_rows": ("Rows that attended to everything: too short, or asked to.", ()),
    "kv_tokens": ("KV tokens visible to decoded rows, summed over layers.", ("role",)),
    "kv_tokens_attended": ("KV tokens attended to by a KV head, summed over layers.", ("role",)),
    "selected_units": ("Units listed for a KV head of one layer: pages, or tokens.", ("unit",)),
    "selections": ("Rows whose lists were selected anew.", ()),
    "selection_refreshes": ("Rows whose sketch channels were chosen anew.", ()),
    "cap_hits": ("Rows whose budget did not fit the lists.", ()),
    "mass_lists": ("Lists attended to until a share of the mass was reached.", ("layer",)),
    "mass_blocks": ("Blocks that those lists attended to.", ("layer",)),
    "mass_domain_blocks": ("Blocks that they could have attended to.", ("layer",)),
    "mass_share_millionths": ("Shares that they estimated, summed, in millionths.", ("layer",)),
    "mass_cap_hits": ("Lists that ended at their cap before the share was reached.", ("layer",)),
    "plane_reuse_prefills": ("Prefills that took planes of a shared prefix.", ()),
    "plane_reuse_tokens": ("Prefix tokens whose KV and planes were reused.", ()),
    "plane_reuse_pages": ("Prefix pages whose KV and planes were reused.", ()),
    "plane_recomputed_pages": ("Pages back from the host, with planes computed anew.", ()),
    "frame_hits": ("Blocks of a decode step that lay in a frame.", ()),
    "frame_loads": ("Blocks that decode steps took from host memory.", ()),
    "frame_loaded_bytes": ("Bytes of those blocks.", ()),
    "frame_stall_nanoseconds": ("Time that decode steps waited for those blocks.", ()),
    "frame_flushed_bytes": ("Bytes of full pages that decode steps wrote to host memory.", ()),
    "prompt_read_bytes": ("Bytes that prompts took from host memory.", ()),
    "prompt_written_bytes": ("Bytes that prompts wrote to host memory.", ()),
}


class Exporter:
    """Turns sums since the start into Prometheus counters."""

    def __init__(self, facts: Facts, labels: dict[str, Any]) -> None:
        """Register the metrics; ``labels`` are those of SGLang's scheduler collector."""
        # After SGLang has set PROMETHEUS_MULTIPROC_DIR, which prometheus_client reads on import.
        from prometheus_client import Counter as PrometheusCounter
        from prometheus_client import Gauge, Histogram

        self._labels = labels
        names = tuple(labels)
        self._counters = {
            name: PrometheusCounter(PREFIX + name, text, (*names, *own))
            for name, (text, own) in COUNTERS.items()
        }
        self._share = Histogram(
            PREFIX + "kv_share",
            "Share of the visible KV that was attended to, between two publications.",
            (*names, "role"),
            buckets=_SHARES,
        )
        self._seen: dict[tuple[str, str], int] = {}
        self._layers = {role: len(layers) for role, layers in facts.layers.items()}
        # Several ranks may have the same KV head, and each selects from it.
        self._unit, self._kv_heads = facts.unit, facts.kv_heads * facts.ranks
        copies = self._kv_heads // facts.total_kv_heads
        self._streaming = {role: copies * n for role, n in facts.streaming_heads.items()}
        planes = Gauge(
            PREFIX + "plane_bytes",
            "Device bytes of the planes.",
            (*names, "plane"),
            multiprocess_mode="mostrecent",
        )
        for plane, size in facts.plane_bytes.items():
            planes.labels(**labels, plane=plane).set(size)

    def _to(self, name: str, total: int, **own: str) -> int:
        """Raise a counter to ``total``; returns by how much."""
        key = (name, "".join(own.values()))
        before = self._seen.get(key, 0)
        # Sums of two kinds may be read at two moments. A counter must never fall.
        self._seen[key] = total = max(total, before)
        change = total - before
        self._counters[name].labels(**self._labels, **own).inc(change)
        return change

    def publish(
        self,
        steps: dict[str, int],
        sums: dict[str, int],
        mass: dict[int, dict[str, int]] | None,
        frames: dict[str, int] | None,
        tree_cache: Any,
    ) -> None:
        """Publish sums of :class:`~sglang_sparse.backend.counters.DecodeCounters`.

        Args:
            steps: decode steps planned, by variant.
            sums: by the names of ``COUNTS``.
            mass: sums of a budget of mass, by layer and by the names of the progressive kernels'
                ``COUNTERS``; None under another budget.
            frames: sums of frames, where KV lies in host memory.
            tree_cache: SGLang's; with ``plane_reuse`` if planes are shared through it.
        """
        for variant, planned in steps.items():
            self._to("decode_steps", planned, variant=variant)
        self._to("decode_rows", sums["rows"])
        self._to("dense_fallback_rows", sums["dense_rows"])
        for role, layers in self._layers.items():
            dense = role.startswith("dense")
            attended = sums["kv_tokens"] * layers if dense else self._attended(role, sums)
            if mass is not None and not dense:
                attended += self._fewer(sums, mass)
            visible = self._to("kv_tokens", sums["kv_tokens"] * layers, role=role)
            change = self._to("kv_tokens_attended", attended, role=role)
            if visible:
                self._share.labels(**self._labels, role=role).observe(change / visible)
        self._to("selected_units", sums["selected_units"], unit=str(self._unit))
        self._to("selections", sums["selections"])
        self._to("selection_refreshes", sums["refreshes"])
        self._to("cap_hits", sums["cap_hits"])
        for layer, reached in ({} if mass is None else mass).items():
            for name, total in reached.items():
                metric = "mass_lists" if name == "pairs" else f"mass_{name}"
                self._to(metric, total, layer=str(layer))
        if frames is not None:
            for name in ("hits", "loads", "loaded_bytes", "stall_nanoseconds", "flushed_bytes"):
                self._to(f"frame_{name}", frames[name])
            for name in ("prompt_read_bytes", "prompt_written_bytes"):
                self._to(name, frames[name])
        reuse = getattr(tree_cache, "plane_reuse", None)
        if reuse is not None:
            counts = asdict(reuse)
            self._to("plane_reuse_prefills", counts["prefills_with_reuse"])
            self._to("plane_reuse_tokens", counts["tokens"])
            self._to("plane_reuse_pages", counts["pages"])
            self._to("plane_recomputed_pages", counts["recomputed_pages"])

    def _attended(self, role: str, sums: dict[str, int]) -> int:
        """What a KV head attended to in the layers of a role, of both kinds of heads the mean."""
        streaming = self._streaming.get(role, 0)
        lists = self._layers[role] * self._kv_heads - streaming
        tokens = sums["attended_tokens"] * lists + sums["window_tokens"] * streaming
        return tokens // self._kv_heads

    def _fewer(self, sums: dict[str, int], mass: dict[int, dict[str, int]]) -> int:
        """Attended minus planned tokens of lists that stopped early; negative."""
        reached = sum(layer["blocks"] for layer in mass.values())
        lists = len(mass) * self._kv_heads - sum(self._streaming.values())
        return (reached - sums["selected_units"] * lists) // self._kv_heads * self._unit


def _exporter(reporter: Any) -> Exporter:
    """The exporter of SGLang's metrics reporter, made at its first use."""
    exporter: Exporter | None = getattr(reporter, "_sparse_exporter", None)
    if exporter is None:
        backend = reporter.scheduler.tp_worker.model_runner.attn_backend
        exporter = Exporter(backend.facts(), reporter.metrics_collector.labels)
        reporter._sparse_exporter = exporter
    return exporter


def _enabled(reporter: Any) -> bool:
    # Without selections there is nothing to count beside what SGLang does.
    return (
        reporter.current_scheduler_metrics_enabled
        and selecting_launch_of(reporter.scheduler.server_args) is not None
    )


def after_decode(result: None, reporter: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook on ``SchedulerMetricsReporter.report_decode_stats``, which runs at every step.

    It runs after :func:`.progress_log.after_decode`, which reads the sums of all ranks.
    """
    if reporter.forward_ct_decode % reporter.decode_log_interval or not _enabled(reporter):
        return
    scheduler = reporter.scheduler
    backend = scheduler.tp_worker.model_runner.attn_backend
    sums = backend.counters.poll()
    mass = progress_log.last(reporter)
    if sums is not None and (mass is not None or backend.progress is None):
        frames = backend.frame_counts(wait=False)
        _exporter(reporter).publish(
            backend.decode.planned, sums, mass, frames, scheduler.tree_cache
        )


def when_idle(result: None, reporter: Any) -> None:
    """AFTER hook on ``SchedulerMetricsReporter._maybe_log_idle_metrics``."""
    if _enabled(reporter):
        backend = reporter.scheduler.tp_worker.model_runner.attn_backend
        if backend.counters.changed:
            alone = backend.facts().ranks == 1  # others do not run this at the same moment
            mass = backend.reached() if alone else progress_log.last(reporter)
            publish_now(reporter.scheduler, mass)


def publish_now(scheduler: Any, mass: dict[int, dict[str, int]] | None) -> None:
    """Publish everything that has been counted; waits for the device if anything has.

    Args:
        scheduler: SGLang's.
        mass: what the heads of all ranks reached under a budget of mass, as in `publish`.
    """
    reporter = scheduler.metrics_reporter
    backend = scheduler.tp_worker.model_runner.attn_backend
    # What ranks reached may be newer than the last publication, which did not wait for them.
    if _enabled(reporter) and (backend.counters.changed or mass is not None):
        _exporter(reporter).publish(
            backend.decode.planned,
            backend.counters.read(),
            mass,
            backend.frame_counts(wait=True),
            scheduler.tree_cache,
        )
