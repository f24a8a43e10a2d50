"""Failures of instances: what is lost, and how it is recovered."""

from typing import TYPE_CHECKING

from mooncake_serving.conductor import AcceptAll, Reason, Why

from .job import Job

if TYPE_CHECKING:
    from .disaggregated import Disaggregated
    from .options import Failure


def fail(cluster: "Disaggregated", failure: "Failure") -> None:
    """Lose an instance with its KV for a while; its requests are decided about again.

    What was prefilled on another instance is in that one's cache, so that a decode instance's
    requests are soon back.
    """
    i, num_prefill = failure.instance, cluster.options.num_prefill
    lost = cluster.conductor.failed(i)
    if i < num_prefill:
        cluster.prefill[i].fail()
        cluster.publishers[i].lost_all()
    else:
        cluster.decode[i - num_prefill].fail()
    jobs = [cluster.jobs[job_id] for job_id in lost]
    for job in jobs:
        _forget(cluster, job)
    cluster.network.fail(cluster.nics[i])
    up_at_s = cluster.clock.now + failure.down_s
    cluster.up_at_s[i] = max(up_at_s, cluster.up_at_s.get(i, 0.0))
    cluster.clock.after(failure.down_s, _recover, cluster, i)
    for job in jobs:
        cluster.arrive(job)


def restart(cluster: "Disaggregated", job: Job) -> None:
    """Serve a job again whose prefill instance has failed while its KV was in flight."""
    if job.finished_s is None and job.rejected is None:
        cluster.conductor.decoded(job.job_id)
        _forget(cluster, job)
        cluster.clock.after(0.0, cluster.arrive, job)


def waits(cluster: "Disaggregated", job: Job, reason: Reason) -> bool:
    """Keep a refused job until an instance is back, if all are accepted and it needs only that."""
    is_down = reason.why in (Why.NO_PREFILL_INSTANCE, Why.NO_DECODE_INSTANCE)
    if not is_down or not isinstance(cluster.conductor.admission, AcceptAll):
        return False
    if job.prefill_instance is not None:  # it is prefilled, and only its blocks are kept
        _forget(cluster, job)
    cluster.waiting.append(job)
    return True


def _recover(cluster: "Disaggregated", instance: int) -> None:
    """Bring an instance back, unless it has failed again meanwhile, and for longer."""
    if cluster.clock.now >= cluster.up_at_s[instance]:
        cluster.conductor.recovered(instance)
        waiting, cluster.waiting = cluster.waiting, []
        for job in waiting:
            cluster.arrive(job)


def _forget(cluster: "Disaggregated", job: Job) -> None:
    """Remove a job from everything; what it fetched stays where it is."""
    if job.prefill_instance is not None:
        cluster.prefill[job.prefill_instance].drop(job)
        cluster.report_queue(job.prefill_instance)  # where it may be computed on, to no end
    if job.fetch is not None:
        cluster.network.cancel(job.fetch)
        job.fetch = None
    cluster.unsend(job)
    job.restart()
    job.ready = True
