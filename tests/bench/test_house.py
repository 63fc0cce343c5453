"""What the count says of a small checkout of which everything is known."""

import json
from pathlib import Path

import pytest

from bench.common import ROOT
from bench.house import WIRE_TYPE, main, make_document, sizes, spread
from tests.support.house import read_house, read_modules

FILES = {
    "slipstream/__init__.py": "",
    "slipstream/one.py": "import grpc\nfrom slipstream import two\n\nclass Job:\n    def run(self): ...\n",
    "slipstream/two.py": "def late():\n    import slipstream.one\n",
    "slipstream/rpc/codec.py": "from slipstream.rpc.v1 import job_pb2\nfrom . import names\n",
    "slipstream/rpc/names.py": "import typing\nif typing.TYPE_CHECKING:\n    from slipstream.rpc import codec\n",
    "slipstream/rpc/v1/job_pb2.py": "class Generated: ...\n",
    "services/target/one.py": "class Twice: ...\n",
    "services/target/__main__.py": "from slipstream.services.target.one import Twice\nclass Twice: ...\n",
    "proto/slipstream/rpc/v1/job.proto": "message Job {\n  // message of old\n}\n",
    "bench/short.py": "def f():\n" + "    pass\n" * 60,
}
CAME_WITH = {
    "models over several processes; how upstream is had to load shares of them": 7,
    "static steps": 7,
    "static steps that several ranks share: what they agree on; steps that are told": 2,
    "text that is already there": 9,
    "documents, and the service that reads them": 18,
    "documents at the gateway: run, source, hints that come late, codec, client": 7,
    "jobs of many parts, and documents in the archive": 6,
    "a gate that remembers": 1,
    "the costs that foresee how many targets a draft should serve": 1,
    "films in segments: cuts, shots, windows; captioner, codec, client, view; their runner, and parts of any job": 9,
    "what a confined process prints, on its own": 1,
    "the HTTP front": 29,
    "its page, and the archive as it shows it": 2,
    "traces for OpenTelemetry": 1,
    "what gateway and models exchange, on its own": 1,
    "regions of pages that are read first": 2,
    "formats in tiers, and pictures as a screen shows them": 2,
    "dynamic trees: line, rows, chances, waiting; what a draft wrote and reads; its writer and passes on their own": 9,
    "what KEDA is told of the archive's work": 1,
    "whether the front can do its work, looked at no oftener than once a second": 1,
    "prompts that ride along: which rows, a prompt in rows, who waits": 3,
    "a queue whose server Sentinel replaces; its scripts apart from it": 2,
    "before and after a batch: marks, estimates, audits, texts found and cut out; their clients and commands": 15,
    "captions that are spared: fingerprints, marks, what follows for a caption, and those kept in the archive": 4,
    "films in buckets by ranges: their cache, sources, boxes, both ends and the wire; blocking calls; manifests": 8,
    "results that leave Redis: files, table, reader, folder; chunks; queue, compactor, feeder": 8,
    "films: summaries, results by segment, their lines, rows for Parquet and its file; what a row of options says": 6,
    "what services say of themselves, apart from what they exchange": 1,
    "what lies between products on CUDA, apart from the layers that every step takes": 1,
    "a gate before the OCR": 1,
    "rows of Ray Data: the stage, and its parts": 2,
    "several targets and drafts of a gateway, and which takes a caption": 1,
    "results that are committed together": 1,
    "what is usual in a batch, as the page asks for it": 1,
    "attention that is compiled for the CPU: code, products, attention; which way to attend a model gets": 4,
    "ways to attend, tried as a GPU records them": 1,
    "services of one GPU start in turn": 1,
    "receipts that callers write, and who reads documents for the command": 2,
    "what is damaged of clips and of films, and the packets of a film, listed once": 2,
    "copies to a device that nobody waits for, for sampling, too": 1,
    "how gateways are reached, whatever is asked of them": 1,
    "pulls of guidance that end; time limits of messages apart from the guards; what is written of a batch of HTTP": 3,
    "times of packets, apart from containers": 1,
    "what a pass costs all whom it serves": 1,
    "rows of a small draft: who writes them, and their compiled code": 2,
    "a session's work, apart from the passes that its steps share": 1,
    "time limits that say what was not done": 1,
    "what every service is told; how a process ends, that of the front, too": 2,
    "what is tried at a start, whatever it raises": 1,
    "texts of a structure, whose parser is tried in a process of its own; what HTTP's clients call one": 3,
    "functions that an answer over HTTP calls": 1,
    "answers as OpenAI's newer protocol has them: what is asked, what is told": 2,
    "several texts of one request, and each while it is written": 2,
    "batches for both endpoints: how their answers are told, and what these have of their requests": 1,
    "penalties, apart from how tokens are chosen": 1,
    "waits for other ranks that nothing else ends; a follower's side of the ranks, apart from rank 0's": 2,
    "what a row of a manifest means, apart from its forms": 1,
    "a line that is a static tree": 1,
    "messages as Anthropic's clients write them: what is asked, and the answers": 2,
    "families whose videos are so many pictures": 2,
    "frames at nearly their own size, which share a bound": 1,
    "a family that tells times behind its pictures": 1,
    "what a loaded model says of itself, apart from loading it": 1,
    "layers that recur: rule, caches, passes, those of several processes, too; a family of such models": 5,
    "a family whose time axis knows no seconds": 1,
    "experts of a strict width": 1,
}
"""Modules beyond the renovation's bound, by the capability that they brought."""
CODECS_CAME_WITH = {"documents at the gateway", "films in segments", "what KEDA is told"}
"""The same of modules that see messages of the wire."""
CHECKS_CAME_WITH = {
    "checks for a GPU": 1,
    "hints": 3,
    "documents": 5,
    "real scans": 1,
    "a gate that remembers": 1,
    "the HTTP front": 1,
    "its page": 1,
    "rounds": 1,
    "dynamic trees": 1,
    "the simulator apart from the program that prints its table": 1,
    "the archive at scale": 1,
    "films drafted from themselves": 1,
    "whose prompt goes first": 1,
    "one draft for several targets": 1,
    "prompts that ride along": 1,
    "engines that exist: parts, and Slurm": 2,
    "clients and attackers before the HTTP front": 2,
    "estimates and searches at scale": 2,
    "near-duplicates, and placement on equal hardware": 2,
    "results that leave Redis": 1,
    "films in buckets": 1,
    "prompts that ride along: measured, and in simulated time": 2,
    "several prompts about the segments of a film": 1,
    "the parts of the archive at scale apart from the film that is killed": 1,
    "three hosts, four queues": 2,
    "documents from end to end": 1,
    "readers that fail as services, and the gateway that all parts about pages share": 2,
    "captions again by the commands of the archive": 1,
    "rows of Ray Data on two raylets": 1,
    "the page of the HTTP front under a long stream": 1,
    "pruners where what is kept matters": 1,
    "two releases on one queue": 1,
    "steps of the queue": 1,
    "very long manifests with bad lines": 1,
    "drafts that are bad, and good, over many captions of the stack": 1,
    "formats, audits and other stores at scale; who works in a spill; damaged input": 5,
}
"""The same of bench: of the seven modules of the checks for a GPU the rest was room."""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "slipstream" / "services").symlink_to("../services")
    return tmp_path


def test_files_that_a_link_reaches_count_once_and_generated_ones_never(tree: Path) -> None:
    product = make_document(tree)["areas"]["product"]
    assert (product["modules"], product["with_init"]) == (6, 7)


def test_imports_are_those_of_run_time_wherever_they_stand(tree: Path) -> None:
    house = read_house(tree)
    assert set(house.cycle) == {"slipstream/one.py", "slipstream/two.py"}
    assert house.graph[Path("services/target/__main__.py")] == {Path("services/target/one.py")}


def test_names_that_mean_two_things(tree: Path) -> None:
    document = make_document(tree)
    assert document["repeated_files"] == {"one.py": 2}
    assert document["ambiguous_classes"] == ["Job", "Twice"]
    assert (document["imports_pb2"], document["imports_grpc"], document["imports_wire"]) == (1, 1, 2)


def test_what_is_too_long_is_named(tree: Path) -> None:
    assert make_document(tree)["areas"]["bench"]["long_functions"] == ["bench/short.py:1 f"]


def test_the_last_line_is_a_short_document(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--tree", str(tree)])
    line = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(line) == make_document(tree) and len(line) < 8000


def test_spread() -> None:
    assert spread(range(1, 102)) == {"p50": 51, "p90": 91, "max": 101}
    assert spread([]) == {"p50": 0, "p90": 0, "max": 0}


def test_a_tree_without_circles_has_none(tree: Path) -> None:
    (tree / "slipstream" / "two.py").write_text("")
    assert read_house(tree).cycle == []


def test_our_own_house_keeps_its_bounds() -> None:
    house = read_house(ROOT)
    product, bench = sizes(house.modules), sizes(read_modules(ROOT, ("bench",)))
    assert product["modules"] <= 115 + sum(CAME_WITH.values())
    assert bench["modules"] <= 55 + sum(CHECKS_CAME_WITH.values())
    assert not product["long_files"] and not product["long_functions"]
    assert not house.cycle and len(house.importing(WIRE_TYPE)) <= 15 + len(CODECS_CAME_WITH)
