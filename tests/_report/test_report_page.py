"""The page of a report in a real browser: it opens from a file, draws, sorts, filters, prints, and asks for nothing."""

from __future__ import annotations

import base64
import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest
from limits import HANG_S
from report_records import SPACE, record

from tunebook._report import report

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
if BROWSER is None or DRIVER is None:
    pytest.skip("Debian's chromium and chromium-driver are not installed", allow_module_level=True)
if importlib.util.find_spec("selenium") is None:
    pytest.skip("selenium is not installed", allow_module_level=True)

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--window-size=1280,1000",
)  # fmt: skip
ROOF = {"flops": 2e7, "bytes": 1e6, "flops_per_s": 1e12, "bytes_per_s": 1e11}
READY = """
const done = arguments[0], root = document.documentElement;
(function wait() {
  root.dataset.ready ? done(document.querySelectorAll("svg.chart").length) : setTimeout(wait, 10);
})()
"""
# Of each chart its title, its size and how many marks it has.
SIZES = """
return [...document.querySelectorAll("svg.chart")].filter(chart => chart.getClientRects().length).map(chart => {
  const box = chart.getBoundingClientRect(), marks = chart.querySelectorAll("circle,rect,path").length;
  return [chart.querySelector("title").textContent, box.width, box.height, marks];
})
"""
SPILT = """
return [...document.querySelectorAll("svg.chart text")].filter(text => text.getClientRects().length).filter(text => {
  const chart = text.ownerSVGElement.getBoundingClientRect(), box = text.getBoundingClientRect();
  return box.right > chart.right + 12 || box.left < chart.left - 12;
}).map(text => text.textContent)
"""
HEADING = """
return [...table(arguments[0]).querySelectorAll("th button")].find(button => button.textContent === arguments[1])
"""
# Elements that reach over the right edge, or that scroll sideways.
OUTSIDE = """
return [...document.querySelectorAll("main *")].filter(e => !e.closest("svg") && e.getClientRects().length).filter(
  e => e.getBoundingClientRect().right > 391 ||
    (e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflowX === "auto")
).map(e => `${e.tagName}.${e.className} ${e.textContent.slice(0, 40)}`)
"""
SMALLEST = """
const texts = [...document.querySelectorAll("svg.chart text")].filter(text => text.getClientRects().length);
return Math.min(...texts.map(text => text.getScreenCTM().a * parseFloat(getComputedStyle(text).fontSize)))
"""
WIDE_TABLE = """
const place = table("entries").querySelector(".scroll");
return [place.scrollWidth > place.clientWidth, getComputedStyle(place).backgroundImage]
"""
# The edges of the entries, the edges of the text around them, and whether the table scrolls sideways.
MARGINS = """
const main = document.querySelector("main"), style = getComputedStyle(main), around = main.getBoundingClientRect();
const box = table("entries").getBoundingClientRect(), place = table("entries").querySelector(".scroll");
const left = around.left + parseFloat(style.paddingLeft), right = around.right - parseFloat(style.paddingRight);
return [box.left - left, right - box.right, place.scrollWidth > place.clientWidth]
"""
PASTE = """
document.querySelector("#paste")?.remove();
const area = document.createElement("textarea");
area.id = "paste";
document.body.prepend(area);
area.focus();
"""
PICK = """
const select = table("entries").querySelector("select[aria-label=Device]");
select.selectedIndex = 2;
select.dispatchEvent(new Event("change"));
"""
WATCH_PRINTING = """
addEventListener("beforeprint", () => { window.closed_ones = document.querySelectorAll("details:not([open])").length })
"""
EVIL = '<img src=x onerror="window.harmed=1"><script>window.harmed=1</script>'


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """Two kernels on two devices, with failures, work and more entries than fit on a page of the table."""
    records = [record(size=n, roofline=ROOF, failing=SPACE[2:4]) for n in range(40)]
    records += [record(op="softmax@v1", device="cuda:y", size=n, default=SPACE[7]) for n in range(3)]
    records += [record(op="broken@v1", size=5, failing=SPACE)]
    long = [{**config, "a_parameter_with_a_very_long_name": 123456} for config in SPACE]
    records += [
        record(op="a_package.of_many.modules.and_a_kernel_of_a_long_name@v1", size=7, space=long, default=long[0])
    ]
    path = tmp_path_factory.mktemp("report") / "report.html"
    report(records, path, title="A book")
    return path


def opened(browser, path):
    """Open a page, and return what was asked of the network for it."""
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(path.as_uri())
    browser.set_script_timeout(30)
    browser.execute_async_script(READY)
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
    # Its own first page asks for things as well, late.
    return [params["request"]["url"] for params in sent if params["documentURL"] == path.as_uri()]


@pytest.fixture
def page(browser, book):
    opened(browser, book)
    return browser


def run(page, script, *arguments):
    table = "const table = name => document.querySelector(`[data-table=${name}]`);"
    return page.execute_script(f"{table} {script}", *arguments)


def cells(page, table, number):
    script = "return [...table(arguments[0]).querySelectorAll('tbody tr')].map(r => r.cells[arguments[1]].textContent)"
    return run(page, script, table, number)


def heads(page, table):
    return run(page, "return [...table(arguments[0]).querySelectorAll('th')].map(h => h.textContent)", table)


def press(page, table, name):
    """Focus a heading and press Enter, as without a mouse."""
    from selenium.webdriver.common.keys import Keys

    button = run(page, HEADING, table, name)
    button.send_keys(Keys.ENTER)


def test_it_opens_from_a_file_without_an_error_and_asks_for_nothing(browser, book):
    asked = opened(browser, book)
    assert asked == [book.as_uri()]
    assert [entry for entry in browser.get_log("browser") if entry["level"] != "INFO"] == []
    assert browser.title == "A book · tunebook"


def test_the_entries_stay_inside_the_margins_of_the_page(browser, page, tmp_path):
    left, right, _ = run(page, MARGINS)
    assert (left, right) == pytest.approx((0, 0), abs=1)
    path = tmp_path / "report.html"
    report([record(size=n, failing=SPACE[2:4]) for n in range(9)], path)
    opened(browser, path)
    assert run(browser, MARGINS) == pytest.approx([0, 0, False], abs=1), "and a plain book needs no scrolling"


def test_every_chart_is_drawn(page):
    titles = {
        "Gain over the heuristic",
        "Roofline",
        "Compiling and measuring",
        "Winners by size",
        "Failures",
        "Tunings",
    }
    titles |= {"All entries", "No winner"}
    assert titles == set(run(page, "return [...document.querySelectorAll('h2')].map(h => h.textContent)"))
    run(page, "document.querySelectorAll('details').forEach(d => d.open = true)")
    sizes = run(page, SIZES)
    assert len(sizes) > 20
    assert {title for title, *_ in sizes} >= {
        "the winner of each kernel by size",
        "every candidate through its parameters",
    }
    assert [size for size in sizes if not (size[1] > 100 and size[2] > 30 and size[3] > 0)] == []
    spilt = run(page, SPILT)
    assert spilt == [], "text outside of its chart"


def test_a_table_is_sorted_by_its_headings_with_the_keyboard(page):
    at = heads(page, "groups").index("Gain")
    press(page, "groups", "Gain")
    down = [float(text.split()[0]) for text in cells(page, "groups", at) if text]
    press(page, "groups", "Gain")
    up = [float(text.split()[0]) for text in cells(page, "groups", at) if text]
    assert down == sorted(down, reverse=True)
    assert up == sorted(up) == down[::-1]
    assert run(page, "return table('groups').querySelector('th[aria-sort]').ariaSort") == "ascending"


def test_entries_are_turned_over_page_by_page(page):
    count = "return table('entries').querySelector('.count').textContent"
    assert run(page, count) == "1\u201325 of 45"
    assert len(cells(page, "entries", 0)) == 25
    run(page, "table('entries').querySelector('[aria-label=\"Next page\"]').click()")
    assert run(page, count) == "26\u201345 of 45"
    assert len(cells(page, "entries", 0)) == 20


def test_entries_are_filtered_by_words_and_by_choice(page):
    box = run(page, "return table('entries').querySelector('input')")
    box.send_keys("SOFTMAX [2,")
    assert cells(page, "entries", 1) == ["softmax@v1"]
    assert run(page, "return table('entries').querySelector('.count').textContent") == "1 of 45"
    box.clear()
    box.send_keys(" ")
    run(page, PICK)
    assert set(cells(page, "entries", 2)) == {"cuda:y"}


def test_missing_values_are_sorted_last_both_ways(browser, tmp_path):
    report([*(record(size=n) for n in range(9)), record(failing=SPACE, size=99)], tmp_path / "report.html")
    opened(browser, tmp_path / "report.html")
    at = heads(browser, "entries").index("Gain")
    for _ in range(2):
        press(browser, "entries", "Gain")
        assert cells(browser, "entries", at)[-1] == ""


def test_it_is_light_or_dark_as_the_system_says_and_as_the_reader_says(page):
    def ground():
        return sum(map(int, run(page, "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g)"))) / 3

    for scheme in ("light", "dark"):
        page.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        )
        assert (ground() > 128) is (scheme == "light")
        run(page, "document.querySelector('.toggle').click()")
        assert (ground() > 128) is (scheme == "dark")
        run(page, "delete document.documentElement.dataset.theme")
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.fixture
def phone(page):
    size = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    run(page, "document.querySelectorAll('details').forEach(d => d.open = true)")
    yield page
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_on_a_phone_the_names_stand_in_the_rows_and_not_above_them_too(phone):
    assert run(phone, "return [...document.querySelectorAll('th')].filter(e => e.getClientRects().length).length") == 0
    assert run(phone, "return document.querySelectorAll('td[data-name]').length") > 0


def test_on_a_phone_nothing_is_outside_and_no_text_is_tiny(phone):
    assert run(phone, "return document.documentElement.scrollWidth") == 390
    assert run(phone, OUTSIDE) == []
    spilt = run(phone, SPILT)
    assert spilt == [], "text outside of its chart"
    assert run(phone, SMALLEST) >= 9


def test_a_wide_table_shows_that_it_goes_on(page):
    size = {"width": 800, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        wide, style = run(page, WIDE_TABLE)
        assert wide, "the table is wider than the screen"
        assert style.count("linear-gradient") == 4
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_commands_are_copied_from_a_page_of_a_file(page):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.wait import WebDriverWait

    buttons = ("details[open] .about .copy", "[data-table=detail0] td .copy", "[data-table=entries] td .copy")
    for selector in buttons:
        button = run(page, "return document.querySelector(arguments[0])", selector)
        command = button.get_attribute("data-copy")
        assert re.match(r"tunebook (pin|explain) [0-9a-f]{8}", command)
        run(page, "arguments[0].scrollIntoView({block: 'center'})", button)
        button.click()

        def pasted(_, command=command):  # again and again: a browser writes to its clipboard after the click is over
            run(page, PASTE)
            ActionChains(page).key_down(Keys.CONTROL).send_keys("v").key_up(Keys.CONTROL).perform()
            return run(page, "return document.querySelector('#paste').value") == command

        WebDriverWait(page, HANG_S).until(pasted, f"{command} is not on the clipboard")


def test_the_first_lines_name_the_entries_without_a_winner_and_link_to_them(page):
    alarm = run(page, "return document.querySelector('.alarm').textContent")
    assert alarm == "1 of 45 entries has no winner: broken@v1 a=float32[5,64]."
    for link in run(page, "return [...document.querySelectorAll('main a')]"):
        assert run(page, "return document.querySelector(arguments[0].hash) !== null", link)


def test_it_prints_with_every_tuning_open_and_closes_them_again(page):
    before = run(page, "return document.querySelectorAll('details[open]').length")
    run(page, WATCH_PRINTING)
    printed = base64.b64decode(page.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"])
    assert printed.startswith(b"%PDF")
    assert printed.count(b"/Type /Page\n") + printed.count(b"/Type /Page ") > 3
    assert run(page, "return window.closed_ones") == 0
    assert run(page, "return document.querySelectorAll('details[open]').length") == before


def test_text_of_a_record_is_shown_and_never_run(browser, tmp_path):
    evil = record(op=EVIL, device=EVIL, failing=SPACE[:3], message=EVIL, rule=EVIL, disturbances=[EVIL])
    odd = record(op="odd@v0", space=[{EVIL: n, "block": EVIL} for n in range(9)])
    report([evil, odd], tmp_path / "evil.html", title=EVIL)
    asked = opened(browser, tmp_path / "evil.html")
    run(browser, "document.querySelectorAll('details').forEach(d => d.open = true)")
    assert run(browser, "return [window.harmed, document.images.length]") == [None, 0]
    assert asked == [(tmp_path / "evil.html").as_uri()]
    assert EVIL in cells(browser, "entries", 1)
    assert [entry for entry in browser.get_log("browser") if entry["level"] != "INFO"] == []


def test_a_page_with_packed_tables_opens_too(browser, tmp_path):
    names = [f"{n}{'o' * 150}@v0" for n in range(8000)]
    made = report([record(op=name, space=SPACE[:1]) for name in names], tmp_path / "packed.html")
    assert 'type="application/gzip"' in made.html
    opened(browser, tmp_path / "packed.html")
    assert run(browser, "return table('entries').querySelector('.count').textContent") == "1\u201325 of 8,000"
    run(browser, "return table('entries').querySelector('input')").send_keys("4321o")
    assert cells(browser, "entries", 1) == [names[4321]]
    assert [entry for entry in browser.get_log("browser") if entry["level"] != "INFO"] == []


def test_a_frame_of_a_notebook_shows_the_same(browser, tmp_path):
    framed = Path(tmp_path / "notebook.html")
    framed.write_text(f"<!doctype html><meta charset=utf-8><body>{report([record()])._repr_html_()}", encoding="utf-8")
    browser.get(framed.as_uri())
    browser.switch_to.frame(0)
    assert browser.execute_async_script(READY) >= 4
    browser.switch_to.default_content()
