"""The page in a browser, over a real bootstrap and three real peers; then over a hostile run and a large one."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, Route, expect

from tests.page.conftest import NAMES, SHOTS, LiveRun, serious

pytestmark = pytest.mark.timeout(150)
OpenPage = Callable[..., Page]
HOSTILE = [
    "<script>window.pwned=1</script>", "<img src=x onerror=window.pwned=1>", "<svg onload=window.pwned=1>",
    "'\"><iframe srcdoc='<script>parent.pwned=1</script>'>", "javascript:window.pwned=1", "</td></table><b>out</b>",
    "<style>*{display:none}</style>", "<base href=//evil.example>", "<meta http-equiv=refresh content=0>",
    "<a href=javascript:pwned=1>click</a>", "&lt;b&gt;", "{{constructor.constructor('pwned=1')()}}", "${pwned=1}",
    "<!--", "]]>", "\\u003cscript\\u003e", "%3Cscript%3E", "<details open ontoggle=pwned=1>",
    "<input autofocus onfocus=pwned=1>",
    "<video><source onerror=pwned=1>", "<math><mtext></mtext></math>", "<template><script>pwned=1</script></template>",
    "<form action=//evil.example><button>", "<object data=//evil.example>", "<embed src=//evil.example>",
    "<link rel=stylesheet href=//evil.example>", "<body onload=pwned=1>", "<marquee onstart=pwned=1>",
    "__proto__", "constructor", "toString", "=cmd|' /C calc'!A0", "' OR 1=1 --", "null", "NaN", "A" * 400, "\u202eevil",
    "\u0000\u0007", "\U0001f41f" * 40, "a\nb\tc",
]  # fmt: skip


def row(page: Page, name: str):
    return page.locator("#peer-rows tr", has=page.locator(".nickname", has_text=re.compile(f"^{name}$")))


def number(page: Page, figure: str) -> int:
    return int(page.locator(f".{figure} strong").inner_text())


def test_a_real_run_is_shown_live_with_curves_peers_and_rounds(live: LiveRun, open_page: OpenPage):
    page = open_page(live.bootstrap.page)
    expect(page.locator("#live")).to_have_text("live")
    for name in NAMES:
        expect(row(page, name).locator("td.is-state")).to_have_text("training", timeout=60_000)
    expect(page.locator(".figure.peers strong")).to_have_text("3", timeout=20_000)
    first = page.locator("#timeline li.good").first
    expect(first.locator(".headline")).to_contain_text("committed with", timeout=30_000)
    before = number(page, "round")
    expect(page.locator(".round strong")).not_to_have_text(str(before))
    assert number(page, "round") > before
    expect(page.locator(".figure.loss small")).to_contain_text("validation", timeout=20_000)
    expect(page.locator("#join-command")).to_have_text(f"atoll join {live.bootstrap.address}")
    expect(page.locator("#loss-readout")).to_have_text(re.compile(r"training \d.*validation \d"))
    painted = "[...document.querySelectorAll('#loss-plot canvas')].some(c => c.getContext('2d')"
    painted += ".getImageData(0, 0, c.width, c.height).data.some(v => v))"
    assert page.evaluate(painted)
    for axis in ("round", "time", "tokens"):
        page.click(f"#axis [data-axis={axis}]")
        expect(page.locator(f"#axis [data-axis={axis}]")).to_have_attribute("aria-pressed", "true")
        assert page.locator("#loss-plot .u-wrap").count() == 1
    first.locator("summary").click()
    expect(first.locator("details ul")).to_contain_text("weights in tokens")
    expect(page.locator("#samples pre").first).to_contain_text("def")
    expect(page.locator("#recipe")).to_contain_text("int8")
    contributor = page.locator("#credit-rows tr").first  # read every 15 s
    expect(contributor.locator("th .nickname")).to_have_text(re.compile("|".join(NAMES)), timeout=30_000)
    assert int(contributor.locator("td").nth(1).inner_text().replace(",", "")) >= 1


def test_a_killed_peer_is_gone_within_15_s_and_a_failed_round_has_its_reason(live: LiveRun, open_page: OpenPage):
    page = open_page(live.bootstrap.page)
    expect(row(page, "charlie").locator("td.is-state")).to_have_text("training")
    live.peers["charlie"].close()
    began = time.monotonic()
    expect(row(page, "charlie").locator("td.is-state")).to_have_text("gone", timeout=15_000)
    print(f"gone after {time.monotonic() - began:.1f} s")
    live.peers["bravo"].close()
    page.click("#status [data-status=aborted]")
    lonely = page.locator("#timeline li", has_text="no peer to average with").first
    expect(lonely).to_contain_text("alpha", timeout=40_000)
    lonely.locator("summary").click()
    expect(lonely.locator("details ul")).to_contain_text("reason: 1 of at least 2 peers")
    live.peers["alpha"].close()  # the tests that follow need what is there, and the processors


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1440])
def test_layouts_fit_and_axe_finds_nothing_serious(live: LiveRun, open_page: OpenPage, width: int, theme: str):
    page = open_page(live.bootstrap.page, width, theme)
    expect(row(page, "alpha")).to_be_visible()
    page.locator("#timeline li summary").first.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = "[...document.querySelectorAll('h1, h2, button, input, td, th, dd, .headline, strong')].filter(e => {"
    outside += "const r = e.getBoundingClientRect(); return r.width && (r.left < -1 || r.right > innerWidth + 1)"
    outside += " && !e.closest('.wide') }).map(e => e.outerHTML.slice(0, 80))"
    assert page.evaluate(outside) == []
    if width != 768:
        assert serious(page) == []
    page.locator("#timeline li summary").first.click()
    page.evaluate("scrollTo(0, 0)")
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{theme}-{width}.png", full_page=True)


def test_everything_can_be_reached_and_used_from_the_keyboard(live: LiveRun, open_page: OpenPage):
    page = open_page(live.bootstrap.page)
    expect(row(page, "alpha")).to_be_visible()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    reached, name = [], "(e => e.id || e.dataset.axis || e.dataset.status || e.textContent)(document.activeElement)"
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.append(page.evaluate(name))
    wanted = ["theme", "copy", "tokens", "round", "time", "search", "Peer", "State", "Loss", "committed", "aborted"]
    assert [one for one in wanted if one not in reached] == []
    page.focus("#search")
    page.keyboard.type("BRAV")
    expect(page.locator("#peer-rows tr")).to_have_count(1)
    expect(page.locator("#peers-summary")).to_have_text("1 of 3 peers")
    page.fill("#search", "")
    page.focus("#peer-head th:nth-child(1) button")
    page.keyboard.press("Enter")
    expect(page.locator("#peer-head th:nth-child(1)")).to_have_attribute("aria-sort", "ascending")
    expect(page.locator("#peer-rows .nickname")).to_have_text(sorted(NAMES))
    page.keyboard.press("Space")
    expect(page.locator("#peer-rows .nickname")).to_have_text(sorted(NAMES, reverse=True))
    page.locator("#timeline summary").first.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#timeline details[open]").first).to_be_visible()
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.focus("#theme")
    page.keyboard.press("Enter")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark


def test_history_and_page_come_back_with_the_bootstrap(live: LiveRun, open_page: OpenPage):
    page = open_page(live.bootstrap.page)
    expect(page.locator("#timeline li").first).to_be_visible()
    place = int(live.bootstrap.page.rsplit(":", 1)[1].rstrip("/"))
    before = page.evaluate("fetch('/api/v1/rounds?limit=200').then(r => r.json())")
    live.bootstrap.close()
    said = (live.bootstrap.folder / "bootstrap.log").read_text()
    assert "Traceback" not in said
    assert " INFO " not in said
    assert " INFO bootstrap.follower: checkpoint of round" in (live.bootstrap.folder / "node.log").read_text()
    expect(page.locator("#live")).to_have_text("reconnecting")
    live.bootstrap = live.start_bootstrap(live.bootstrap.port, place)
    expect(page.locator("#live")).to_have_text("live", timeout=40_000)
    after = page.evaluate("fetch('/api/v1/rounds?limit=200').then(r => r.json())")
    assert {one["key"] for one in before} <= {one["key"] for one in after}


def test_a_proxy_without_its_server_is_asked_now_and_then(live: LiveRun, open_page: OpenPage):
    asked: list[str] = []

    def refuse(route: Route) -> None:
        asked.append(route.request.url)
        route.fulfill(status=502, body="Bad Gateway", headers={"content-type": "text/html"})

    def before(page: Page) -> None:
        page.clock.install()
        page.route("**/api/**", refuse)

    page = open_page(live.bootstrap.page, before=before, refused=True)
    expect(page.locator("#live")).to_have_text("reconnecting")
    for _ in range(40):
        page.clock.run_for(3_000)
        page.evaluate("fetch('/style.css').then(() => 0)")  # so that the answers have come
    assert 10 <= len(asked) <= 60
    page.unroute_all()
    page.clock.run_for(11_000)
    expect(page.locator("#live")).to_have_text("live")


def test_a_bootstrap_that_starts_again_at_once_is_followed(live: LiveRun, open_page: OpenPage):
    """The versions of the new process follow those of the old one, however few there were."""
    page = open_page(live.bootstrap.page)
    expect(page.locator("#live")).to_have_text("live")
    version = "fetch('/api/v1/state').then(r => r.json()).then(s => s.version)"
    place, before = int(live.bootstrap.page.rsplit(":", 1)[1].rstrip("/")), page.evaluate(version)
    live.bootstrap.close()
    live.bootstrap = live.start_bootstrap(live.bootstrap.port, place)
    expect(page.locator("#live")).to_have_text("live", timeout=40_000)
    assert page.evaluate(version) > before


def peer_row(place: int, **changes: object) -> dict[str, object]:
    """A peer as the board tells of it."""
    return {
        "peer_id": f"12D3KooW{place:044d}", "nickname": f"peer-{place}", "state": "training", "device": "H100",
        "reached": "open", "round": 7, "step": 9, "tokens": 1000 + place, "tokens_per_s": 10.0 + place, "loss": 2.0,
        "validation": 2.1, "utilisation": 0.9, "mfu": None, "group_size": 3, "bytes_sent": 5, "bytes_received": 6,
        "seconds_waiting": 0.5, "since": 1.0, "heard": 2, "rounds": 3, "contributed": 4000 + place, "sample": "",
        **changes,
    }  # fmt: skip


def round_row(place: int, **changes: object) -> dict[str, object]:
    return {
        "id": place, "key": str(place), "round": place, "at": 1.8e9, "status": "aborted", "tone": "bad",
        "headline": "aborted", "details": [], "teller": "alpha", "members": [], "tokens": 0, "lineage_id": "a" * 64,
        "seconds": {"match": 0.1, "exchange": 0.2, "total": 0.3}, "lineage": "", **changes,
    }  # fmt: skip


def pretending(change: Callable[[dict], None]) -> Callable[[Page], None]:
    """Lets a page read a state that was changed on the way, and no update after it."""

    def answer(route: Route) -> None:
        answer = route.fetch()
        state = answer.json()
        change(state)
        route.fulfill(status=200, headers={**answer.headers, "content-encoding": "identity"}, body=json.dumps(state))

    def before(page: Page) -> None:
        page.route("**/api/v1/state", answer)
        page.route("**/api/v1/updates", lambda route: route.abort())

    return before


def test_hostile_words_stay_text_wherever_they_are_shown(live: LiveRun, open_page: OpenPage):
    assert len(HOSTILE) == 40

    def change(state: dict) -> None:
        state["peers"] = [peer_row(n, nickname=w, device=w, sample=w) for n, w in enumerate(HOSTILE)]
        state["rounds"] = [
            round_row(n + 1, headline=w, details=[w], teller=w, members=[w]) for n, w in enumerate(HOSTILE[:20])
        ]
        state["samples"] = [{"peer": w, "round": 1, "text": w} for w in HOSTILE[:3]]
        state["run"] |= {"name": HOSTILE[0], "join": [HOSTILE[1]], "trust": HOSTILE[2], "organiser": HOSTILE[3]}
        state["run"]["recipe"] |= {"summary": HOSTILE[4], HOSTILE[5]: HOSTILE[6]}
        state["run"]["manifest"] |= {"name": HOSTILE[7]}
        state["now"] |= {"lineage_id": HOSTILE[0], "served": {HOSTILE[1]: [1, 2]}}

    page = open_page(live.bootstrap.page, before=pretending(change))
    expect(page.locator("#peer-rows tr")).to_have_count(40)
    shown = page.evaluate("[...document.querySelectorAll('#peer-rows .nickname')].map(e => e.textContent)")
    assert sorted(shown) == sorted(HOSTILE)
    headlines = page.evaluate("[...document.querySelectorAll('.headline')].map(e => e.lastChild.textContent)")
    assert headlines == HOSTILE[:20]
    foreign = "script:not([src^='/']), iframe, object, embed, style, base, form, video, template, marquee, math"
    assert page.locator(f"{foreign}, meta[http-equiv]").count() == 0
    assert page.locator("main img, main svg").count() == 0
    for item in page.locator("#timeline summary").all()[:3]:
        item.click()
    assert page.evaluate("[window.pwned, document.title]") == [None, f"{HOSTILE[0]} · Atoll"]
    assert page.evaluate("document.documentElement.scrollWidth") <= 1440
    assert serious(page) == []


def test_a_run_of_a_thousand_peers_paints_at_once_and_updates_cheaply(live: LiveRun, open_page: OpenPage):
    def change(state: dict) -> None:
        state["peers"] = [peer_row(n) for n in range(1000)]
        state["rounds"] = [round_row(100_000 - n, status="committed", tone="good") for n in range(60)]
        state["now"] |= {"round": 100_000, "states": {"training": 1000, "joining": 0, "finished": 0, "gone": 0}}

    paints = []
    for _ in range(3):
        page = open_page(live.bootstrap.page, before=pretending(change))
        expect(page.locator("#peers-summary")).to_have_text("50 of 1,000 peers")
        paints.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
    rows = json.dumps([peer_row(n, tokens_per_s=99.0 + n, contributed=9000 - n) for n in range(0, 1000, 2)])
    rounds = json.dumps([round_row(100_001, status="committed", tone="good")])
    took = page.evaluate(f"""async () => {{
        const {{ peers, rounds }} = await import("/main.js");
        const times = [];
        for (let turn = 0; turn < 9; turn += 1) {{
            const rows = {rows}.map((row) => ({{ ...row, tokens_per_s: row.tokens_per_s + turn }}));
            const began = performance.now();
            peers.update(rows, []);
            peers.draw(1.8e9 + turn);
            rounds.update({rounds}, 1.8e9 + turn);
            document.body.getBoundingClientRect();
            times.push(performance.now() - began);
            await new Promise(requestAnimationFrame);
        }}
        return Math.min(...times); // of a machine that does other things, too
    }}""")
    print(f"first paint {min(paints):.0f} ms, an update {took:.1f} ms")
    assert min(paints) < 1000
    assert took < 50
    expect(page.locator("#timeline .number").first).to_have_text("100,001")
    page.fill("#search", "peer-99")
    expect(page.locator("#peers-summary")).to_have_text("11 of 1,000 peers")
