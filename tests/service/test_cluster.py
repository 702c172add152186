"""The client of Ray's Jobs API: what it understands, and that none of httpx's errors leaves it."""

import shlex
from collections.abc import Callable

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.cluster import Cluster, ClusterError, ClusterUnavailable, Job, JobRefused, JobStatus, driver_entrypoint
from tests.service.fake_ray import FakeRay

HEAD = "Job entrypoint command failed with exit code {}, last available logs (truncated to 20,000 chars):\n"


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (
            Job(
                JobStatus.FAILED, HEAD.format(3) + "a\nnormstudy: fatal: no room\nRunning entrypoint for job x: y\n", 3
            ),
            "no room",
        ),
        (Job(JobStatus.FAILED, "normstudy: fatal: one\nnormstudy: fatal: two\n", 3), "two"),
        (Job(JobStatus.FAILED, "normstudy: fatal: no room\n", 1), None),
        (Job(JobStatus.FAILED, "he said: normstudy: fatal: no room\n", 3), None),
        (Job(JobStatus.FAILED, "nothing\n", 3), None),
        (Job(JobStatus.SUCCEEDED, "normstudy: fatal: no room\n", 0), None),
        (Job(JobStatus.STOPPED, "Job was intentionally stopped.", None), None),
    ],
)
def test_the_fatal_reason(job: Job, reason: str | None):
    assert job.fatal_reason == reason


@pytest.mark.parametrize(
    ("job", "summary"),
    [
        (Job(JobStatus.FAILED, HEAD.format(137) + "Killed\n", 137), "the driver was killed by signal 9"),
        (Job(JobStatus.FAILED, "", -15), "the driver was killed by signal 15"),
        (Job(JobStatus.FAILED, HEAD.format(1) + "ValueError: x\n", 1), "the driver ended with status 1: ValueError: x"),
        (Job(JobStatus.FAILED, HEAD.format(1), 1), "the driver ended with status 1: it printed nothing"),
        (Job(JobStatus.FAILED, "The actor died.\nmore", None), "The actor died."),
        (Job(JobStatus.FAILED, "", None), "no message"),
        (Job(JobStatus.STOPPED, "Job was intentionally stopped.", None), "the job was stopped in Ray"),
    ],
)
def test_the_end_in_one_line(job: Job, summary: str):
    assert job.summary == summary


@given(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
    st.lists(st.text("ab c'\"$;"), max_size=3),
)
def test_the_entrypoint_survives_the_shell(study_dir: str, roots: list[str]):
    command = driver_entrypoint(
        "/a b/python",
        study_dir=study_dir,
        study_id="s1",
        attempt=2,
        mlflow_url="http://x",
        data_roots=roots,
        cache_dir="/c",
    )
    words = shlex.split(command)
    assert words[:4] == ["/a b/python", "-m", "trials.driver", "--study-dir"]
    assert words[4] == study_dir
    assert [words[i + 1] for i, word in enumerate(words) if word == "--data-root" and i > 4][: len(roots)] == roots


CALLS: list[Callable[[Cluster], object]] = [
    lambda c: c.submit("x", "true", {}),
    lambda c: c.job("x"),
    lambda c: c.stop("x"),
    lambda c: c.logs("x"),
    lambda c: c.ping(),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "error", [e for e in vars(httpx).values() if isinstance(e, type) and issubclass(e, httpx.HTTPError)]
)
def test_no_error_of_httpx_leaves(call: Callable[[Cluster], object], error: type[Exception]):
    cluster = Cluster("http://127.0.0.1:9")

    def refuse(request: httpx.Request) -> httpx.Response:
        if error is httpx.HTTPStatusError:
            raise httpx.HTTPStatusError("x", request=request, response=httpx.Response(500))
        raise error("x")

    cluster._http = httpx.Client(base_url="http://127.0.0.1:9", transport=httpx.MockTransport(refuse))
    with pytest.raises(ClusterUnavailable, match="does not answer"):
        call(cluster)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "answer", [(200, "<html>"), (200, "[]"), (500, ""), (502, "Bad gateway"), (401, "Unauthorized")]
)
def test_answers_that_are_not_rays(call: Callable[[Cluster], object], answer: tuple[int, str], ray: FakeRay):
    ray.answer_with = answer
    if call is CALLS[2] and answer[0] == 200:
        call(Cluster(ray.url))  # of a stop, only the status matters: whether the job ends is looked at
        return
    with pytest.raises(ClusterUnavailable):
        call(Cluster(ray.url))


def test_the_jobs_of_a_study_that_have_not_ended(ray: FakeRay):
    cluster = Cluster(ray.url)
    assert cluster.alive("s1") == []
    for job_id, metadata in {
        "name-s1-a1": {},
        "name-s1-a1-tracking1": {"normstudy_study": "s1"},
        "another": {"normstudy_study": "s1"},
        "name-s2-a1": {"normstudy_study": "s2"},
        "name-s11-a1": {},
        "ended-s1-a2": {"normstudy_study": "s1"},
    }.items():
        cluster.submit(job_id, "true", metadata)
    ray.end("ended-s1-a2")
    ray.jobs["unsubmitted"] = {"submission_id": None, "status": "RUNNING", "metadata": {"normstudy_study": "s1"}}
    assert cluster.alive("s1") == ["name-s1-a1", "name-s1-a1-tracking1", "another"]


@pytest.mark.parametrize(
    "answer", ["<html>", "{}", "[1]", '[{"submission_id": "x-s1-a1"}]', '[{"submission_id": "x-s1-a1", "status": "?"}]']
)
def test_listings_that_are_not_rays(answer: str, ray: FakeRay):
    ray.answer_with = (200, answer)
    with pytest.raises(ClusterUnavailable):
        Cluster(ray.url).alive("s1")


def test_a_refusal_is_told_from_an_absence(ray: FakeRay):
    ray.refuse_with = (400, "Traceback\nValueError: no")
    with pytest.raises(JobRefused, match="ValueError: no"):
        Cluster(ray.url).submit("x", "true", {})
    assert issubclass(JobRefused, ClusterError)
    ray.refuse_with = (500, "No available agent")
    with pytest.raises(ClusterUnavailable, match="No available agent"):
        Cluster(ray.url).submit("x", "true", {})


def test_a_known_job_is_adopted(ray: FakeRay):
    cluster = Cluster(ray.url)
    assert cluster.submit("x", "true", {"a": "b"})
    assert not cluster.submit("x", "true", {})
    assert ray.submissions == [{"submission_id": "x", "entrypoint": "true", "metadata": {"a": "b"}}]


def test_a_token_is_sent_along():
    seen: list[str | None] = []
    cluster = Cluster("http://127.0.0.1:9", token="abc")

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("Authorization"))
        return httpx.Response(200, json={"ray_version": "2.60.0"})

    cluster._http._transport = httpx.MockTransport(answer)
    assert cluster.ping() == "2.60.0"
    assert seen == ["Bearer abc"]
