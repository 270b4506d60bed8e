"""The page that shows where VMEM goes, in a real browser."""

import json
import shutil
from pathlib import Path

import pytest

from jax_vmem_guard.chips import MiB
from jax_vmem_guard.html import page
from jax_vmem_guard.rows import FAILS, FITS, REPAIRED, Item, Row

ROWS = (
    Row(program="jit_train_step", kernel="flash_attention_forward", source="attention.py:88", topology="v5e:2x2",
        chip="v5e", verdict=REPAIRED, need_bytes=41 * MiB, measured=True, limit_bytes=43 * MiB,
        capacity_bytes=128 * MiB, windows_bytes=24 * MiB, scratch_bytes=9 * MiB, spills_bytes=8 * MiB,
        changes=("limit 16.00 MiB (default) -> 43.00 MiB",),
        edit="attention.py:88: compiler_params=pltpu.CompilerParams(vmem_limit_bytes=45088768)",
        items=(Item(what="input 0", shape="[1, 2048, 128]", dtype="bf16", buffers=2, bytes=MiB),
               Item(what="input 3", shape="[1, 75]", dtype="f32", buffers=2, bytes=8192, remark="pads to [8, 128]"))),
    Row(program="jit_train_step", kernel="matmul", source="matmul.py:12", topology="tpu7x:2x2x1", chip="tpu7x",
        verdict=FAILS, need_bytes=80 * MiB, measured=True, limit_bytes=32 * MiB, capacity_bytes=64 * MiB - 65536,
        windows_bytes=80 * MiB, reason="needs 80.00 MiB, the chip has 63.94 MiB"),
    Row(program="jit_eval", kernel="<b>add & scale</b>", topology="v6e:2x2", chip="v6e", verdict=FITS,
        need_bytes=2 * MiB, measured=True, limit_bytes=32 * MiB, capacity_bytes=128 * MiB - 65536,
        windows_bytes=2 * MiB),
)


@pytest.fixture(scope="session")
def chromium():
    """A headless Chromium, driven by its own driver."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install selenium")
    browser, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("needs Chromium and its driver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(driver)) as running:
        yield running


@pytest.fixture
def opened(chromium, tmp_path):
    """The browser with the page of `ROWS` open at desktop size."""
    file = tmp_path / "report.html"
    file.write_text(page(ROWS, title="Scoped VMEM", instructions=[("fusion.3", 3 * MiB, 16 * MiB)]), encoding="utf-8")
    for kind in ("browser", "performance"):
        chromium.get_log(kind)  # what earlier tests left
    set_viewport(chromium, 1200, 900)
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    chromium.get(file.as_uri())
    return chromium


def set_viewport(browser, width, height):
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600})


def shown_names(browser):
    return browser.execute_script(
        "return [...document.querySelectorAll('tbody.kernel:not([hidden]) .name')].map((e) => e.textContent)")


def press(browser, *keys):
    from selenium.webdriver.common.action_chains import ActionChains

    for key in keys:
        ActionChains(browser).send_keys(key).perform()


def screenshot(browser):
    image = pytest.importorskip("PIL.Image", reason="needs Pillow: pip install pillow")
    import io

    return image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")


def test_lists_every_kernel_with_source_and_edit(opened):
    """Nothing of the report is missing, and text from the program is text, not markup."""
    assert shown_names(opened) == ["flash_attention_forward", "matmul", "<b>add & scale</b>"]
    text = opened.find_element("css selector", "body").get_attribute("textContent")
    for expected in ("attention.py:88", "vmem_limit_bytes=45088768", "pads to [8, 128]", "does not fit", "fusion.3",
                     "needs 80.00 MiB, the chip has 63.94 MiB", "3 kernels on v5e:2x2, tpu7x:2x2x1, v6e:2x2"):
        assert expected in text


def test_says_nothing_on_the_console_and_asks_no_network(opened):
    """No console message, and the only request is the file itself."""
    assert opened.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in opened.get_log("performance")]
    urls = {event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"}
    assert {url.split(":")[0] for url in urls} <= {"file", "data"}
    assert len([url for url in urls if url.startswith("file")]) == 1


def test_forbids_requests(opened):
    """Also a request that something would try to make is refused by the page's own policy."""
    refused = opened.execute_async_script(
        "const done = arguments[0]; fetch('http://127.0.0.1:9/').then(() => done(false), () => done(true));")
    assert refused
    assert any("Content Security Policy" in entry["message"] for entry in opened.get_log("browser"))


@pytest.mark.parametrize(("column", "first", "second"), [
    ("need", ["matmul", "flash_attention_forward", "<b>add & scale</b>"],
     ["<b>add & scale</b>", "flash_attention_forward", "matmul"]),
    ("headroom", ["<b>add & scale</b>", "flash_attention_forward", "matmul"],
     ["matmul", "flash_attention_forward", "<b>add & scale</b>"]),
])
def test_sorts_by_keyboard(opened, column, first, second):
    """Enter on a heading sorts by it, largest first; again the other way round, and assistive technology is told."""
    button = opened.find_element("css selector", f"th[data-key={column}] button")
    opened.execute_script("arguments[0].focus()", button)
    press(opened, "\ue007")
    assert shown_names(opened) == first
    header = opened.find_element("css selector", f"th[data-key={column}]")
    assert header.get_attribute("aria-sort") == "descending"
    press(opened, "\ue007")
    assert shown_names(opened) == second
    assert header.get_attribute("aria-sort") == "ascending"


def test_everything_is_reached_by_tab(opened):
    """Tab visits the search field, the filter, every heading and detail, in reading order, with a visible focus."""
    visited = []
    for _ in range(20):
        press(opened, "\ue004")
        visited.append(opened.execute_script(
            "const e = document.activeElement; return [e.tagName, e.textContent.trim() || e.id,"
            " getComputedStyle(e).outlineStyle]"))
    stops = [words for tag, words, _ in visited if tag != "BODY"]
    assert stops[:9] == ["search", "trouble", "Kernel", "Chip", "Need", "Limit", "Capacity", "Headroom", "Verdict"]
    assert stops[9:11] == ["Where the bytes go"] * 2
    assert all(outline == "solid" for tag, _, outline in visited if tag != "BODY")


def test_filters_by_words_and_by_trouble(opened):
    """The search field matches name, chip and source; the box leaves what does not fit as it is."""
    search = opened.find_element("id", "search")
    search.send_keys("v6e")
    assert shown_names(opened) == ["<b>add & scale</b>"]
    search.send_keys("\ue003" * 3)
    opened.find_element("id", "trouble").send_keys(" ")
    assert shown_names(opened) == ["flash_attention_forward", "matmul"]
    assert opened.find_element("id", "status").text == "2 of 3 rows shown"


def test_bars_are_to_scale(opened):
    """A bar's segments and marks stand where the numbers say, and none leaves its track."""
    boxes = opened.execute_script("""
      return [...document.querySelectorAll(".track")].map((track) => {
        const outer = track.getBoundingClientRect();
        const inner = (css) => [...track.querySelectorAll(css)].map((e) => {
          const box = e.getBoundingClientRect();
          return [(box.left - outer.left) / outer.width, (box.right - outer.left) / outer.width];
        });
        return {parts: inner(".part"), limit: inner(".mark.limit"), capacity: inner(".mark.capacity")};
      })""")
    flash, matmul, _ = boxes
    ends = [right for _, right in flash["parts"]]
    assert ends == pytest.approx([24 / 128, 33 / 128, 41 / 128], abs=0.01)
    assert flash["limit"][0][0] == pytest.approx(43 / 128, abs=0.01)
    assert matmul["capacity"][0][0] == pytest.approx(63.94 / 80, abs=0.01)
    assert all(right <= 1.001 for box in boxes for _, right in box["parts"])


@pytest.mark.parametrize("width", [320, 375, 768, 1440])
def test_fits_the_width_of_the_screen(opened, width):
    """Nothing is cut off or needs sideways scrolling, from a small phone to a desk."""
    set_viewport(opened, width, 800)
    assert opened.execute_script("return document.documentElement.scrollWidth") <= width
    outside = opened.execute_script("""
      return [...document.querySelectorAll(".name, .source, .track, .verdict, pre, th button, input")].filter((e) => {
        const box = e.getBoundingClientRect();
        return box.width && (box.left < -1 || box.right > innerWidth + 1);
      }).map((e) => e.outerHTML.slice(0, 80))""")
    assert outside == []
    opened.execute_script("for (const details of document.querySelectorAll('details')) details.open = true")
    tops = opened.execute_script("""
      return [...document.querySelectorAll("table.items tr")].map((row) =>
        new Set([...row.cells].map((cell) => Math.round(cell.getBoundingClientRect().top))).size)""")
    assert set(tops) == {1}  # the cells of a buffer stand in one line
    assert opened.find_element("css selector", "caption").size["height"] < 60


@pytest.mark.parametrize(("scheme", "paper_is_light"), [("light", True), ("dark", False)])
def test_follows_the_colour_scheme(opened, scheme, paper_is_light):
    """A screenshot has light paper in the light scheme and dark paper in the dark one; text contrasts with it."""
    wanted = {"name": "prefers-color-scheme", "value": scheme}
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [wanted]})
    image = screenshot(opened)
    corner = sum(image.getpixel((2, 2))) / 3
    assert (corner > 200) == paper_is_light
    ratios = opened.execute_script(CONTRAST)
    assert min(ratio for _, ratio in ratios) >= 4.5, sorted(ratios, key=lambda pair: pair[1])[:3]


def test_screenshot_shows_the_bars(opened):
    """In the picture each segment has a colour of its own: three in the first bar, left to right."""
    image = screenshot(opened)
    box = opened.execute_script("const b = document.querySelector('.track').getBoundingClientRect();"
                                "return [b.left, b.right, (b.top + b.bottom) / 2]")
    left, right, middle = box
    at = [image.getpixel((round(left + (right - left) * share), round(middle))) for share in (0.09, 0.22, 0.9)]
    assert len(set(at)) == 3


def test_prints_with_everything_open(opened):
    """On paper there are no controls, and every detail is open."""
    opened.execute_script("document.querySelector('tbody.kernel details').open = false;"
                          "dispatchEvent(new Event('beforeprint'))")
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert not opened.find_element("css selector", ".controls").is_displayed()
    assert opened.execute_script("return document.querySelectorAll('details:not([open])').length") == 0
    pdf = opened.execute_cdp_cmd("Page.printToPDF", {})["data"]
    assert len(pdf) > 1000


def test_without_kernels_it_says_so():
    """An empty report is a page too."""
    text = page((), title="Empty")
    assert "No TPU kernels." in text
    assert "<table" not in text


def test_a_report_shows_itself_in_a_notebook(chromium, tmp_path):
    """`_repr_html_` gives a frame that holds the page of the report's kernels, with nothing on the console."""
    import jax
    from check_targets import large

    from jax_vmem_guard import inspect
    from jax_vmem_guard.stand_in import topology_named

    fun, (x, rows) = large()
    chip = jax.sharding.SingleDeviceSharding(topology_named("v4").devices[0])
    report = inspect(jax.jit(lambda x: fun(x, rows)).lower(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=chip)))
    cell = tmp_path / "cell.html"
    cell.write_text(f"<!DOCTYPE html><link rel='icon' href='data:,'><p>before</p>{report._repr_html_()}", "utf-8")
    chromium.get_log("browser")
    chromium.get(cell.as_uri())
    chromium.switch_to.frame(0)
    assert shown_names(chromium) == ["scale"]
    assert "does not fit" in chromium.find_element("css selector", "body").text
    chromium.switch_to.default_content()
    assert chromium.get_log("browser") == []


def test_page_data_is_in_the_package():
    """Style and script are files of the package, found wherever it is installed."""
    import jax_vmem_guard

    folder = Path(jax_vmem_guard.__file__).parent
    assert (folder / "report_page.css").is_file()
    assert (folder / "report_page.js").is_file()


CONTRAST = """
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((v) => { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const rgb = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const paperOf = (e) => {
    for (; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if (!/rgba\\(.*, 0\\)/.test(colour)) return rgb(colour);
    }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll("h1, p, td, th, .name, .source, .verdict, summary, label, li, pre")]
    .filter((e) => e.textContent.trim())
    .map((e) => {
      const [a, b] = [luminance(rgb(getComputedStyle(e).color)), luminance(paperOf(e))].sort((x, y) => y - x);
      return [e.outerHTML.slice(0, 60), (a + 0.05) / (b + 0.05)];
    });
"""
