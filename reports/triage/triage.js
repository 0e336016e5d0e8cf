"use strict";
// The page works without this script. With it, the page refreshes itself: it fetches its own address
// and changes only what differs, so that focus, selection, scroll position and open lists stay.
(() => {
  const FETCH_TIMEOUT_MS = 15000;
  const REFRESH_MAX_S = 30;
  const refreshS = Number(document.body.dataset.refresh) || 0;
  const connection = document.getElementById("connection");
  let seenMs = performance.now();
  let failures = 0;
  let lostSince = null;
  let paused = false;
  let loading = false;
  let timer = 0;

  document.documentElement.classList.add("js");

  const span = (seconds) => {
    if (seconds < 120) return `${Math.max(0, seconds).toFixed(0)} s`;
    if (seconds < 7200) return `${(seconds / 60).toFixed(0)} min`;
    return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} days`;
  };

  // Adds the time in the reader's own zone, which the server does not know.
  const addLocalTimes = (page) => {
    for (const time of page.querySelectorAll("time")) {
      const moment = new Date(time.dateTime);
      if (Number.isNaN(moment.getTime()) || moment.getTimezoneOffset() === 0) continue;
      const short = { hour: "2-digit", minute: "2-digit", second: "2-digit", timeZoneName: "short" };
      time.title = `${moment.toLocaleString([], { timeZoneName: "short" })}, your time`;
      if ("local" in time.dataset) {
        const local = page.createElement("span");
        local.className = "local";
        local.textContent = ` (${moment.toLocaleTimeString([], short)})`;
        time.after(local);
      }
    }
  };

  // Makes `old` like `fresh`, in place.
  const patch = (old, fresh) => {
    if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) {
      old.replaceWith(document.importNode(fresh, true));
    } else if (old.nodeType !== Node.ELEMENT_NODE) {
      if (old.data !== fresh.data) old.data = fresh.data;
    } else if (!old.matches("[data-mine]") && !(old === document.activeElement && old.matches("input"))) {
      patchAttributes(old, fresh);
      patchChildren(old, fresh);
    }
  };

  const patchAttributes = (old, fresh) => {
    const isClientState = (name) => name === "open" && old.nodeName === "DETAILS";
    for (const { name } of [...old.attributes]) {
      if (!fresh.hasAttribute(name) && !isClientState(name)) old.removeAttribute(name);
    }
    for (const { name, value } of fresh.attributes) {
      if (old.getAttribute(name) !== value && !isClientState(name)) old.setAttribute(name, value);
    }
  };

  // Children with an id are found by it, the others by their place.
  const patchChildren = (old, fresh) => {
    let at = old.firstChild;
    for (const child of [...fresh.childNodes]) {
      const sameId = child.id ? [...old.children].find((candidate) => candidate.id === child.id) : null;
      if (sameId && sameId !== at) old.insertBefore(sameId, at);
      const twin = sameId || (at && !at.id && !child.id ? at : null);
      if (twin) {
        const next = twin.nextSibling;
        patch(twin, child);
        at = next;
      } else {
        old.insertBefore(document.importNode(child, true), at);
      }
    }
    while (at) {
      const next = at.nextSibling;
      at.remove();
      at = next;
    }
  };

  const show = (text) => {
    const page = new DOMParser().parseFromString(text, "text/html");
    const fresh = [...page.querySelectorAll("[data-live]")];
    const old = [...document.querySelectorAll("[data-live]")];
    if (!page.getElementById("main") || fresh.length !== old.length) {
      throw new Error("the response is not the triage page; you may need to sign in again");
    }
    addLocalTimes(page);
    old.forEach((part, place) => patch(part, fresh[place]));
    document.title = page.title;
    const icon = page.querySelector("link[rel=icon]");
    if (icon) document.querySelector("link[rel=icon]").href = icon.getAttribute("href");
  };

  const setStatus = (kind, words) => {
    if (connection.className !== `connection ${kind}`) connection.className = `connection ${kind}`;
    if (connection.textContent !== words) connection.textContent = words;
    document.documentElement.classList.toggle("is-lost", kind === "lost");
  };

  const load = async () => {
    if (loading) return;
    loading = true;
    try {
      const response = await fetch(location.href, {
        headers: { Accept: "text/html" },
        cache: "no-store",
        signal: AbortSignal.timeout(FETCH_TIMEOUT_MS),
      });
      if (!response.ok) throw new Error(`kneewatch responded with status ${response.status}`);
      const text = await response.text();
      if (!paused) {
        show(text);
        seenMs = performance.now();
        setStatus("", "");
      }
      failures = 0;
      lostSince = null;
    } catch (error) {
      failures += 1;
      lostSince ??= new Date();
      const why = error.name === "TypeError" ? "no answer" : error.message;
      if (!paused) {
        setStatus("lost", `Connection to kneewatch lost at ${lostSince.toLocaleTimeString()} your time (${why}). `
          + "Showing the last data received; retrying.");
      }
    }
    loading = false;
    scheduleNext();
  };

  const scheduleNext = () => {
    clearTimeout(timer);
    if (!refreshS || paused || document.hidden) return;
    const waitS = Math.min(refreshS * 2 ** failures, Math.max(refreshS, REFRESH_MAX_S));
    timer = setTimeout(load, 1000 * waitS);
  };

  // Between two responses ages are counted up by the browser's monotonic clock.
  const updateAges = () => {
    const moreS = (performance.now() - seenMs) / 1000;
    for (const age of document.querySelectorAll("[data-age]")) {
      const words = span(Number(age.dataset.age) + moreS);
      if (age.textContent !== words) age.textContent = words;
    }
  };

  const copy = async (button) => {
    const words = button.dataset.copy;
    try {
      await navigator.clipboard.writeText(words);
    } catch {
      // Without TLS there is no clipboard API; selected text can still be copied.
      const box = document.createElement("textarea");
      box.value = words;
      box.readOnly = true;
      button.after(box);
      box.select();
      const done = document.execCommand("copy");
      box.remove();
      button.focus();
      if (!done) {
        button.textContent = "Select and copy";
        return;
      }
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  };

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button?.matches(".copy")) copy(button);
    if (button?.id === "pause") {
      paused = !paused;
      button.textContent = paused ? "Resume" : "Pause";
      button.setAttribute("aria-pressed", String(paused));
      setStatus(paused ? "paused" : "", paused ? "Paused: the page is not updating." : "");
      if (paused) clearTimeout(timer); else load();
    }
  });

  document.addEventListener("visibilitychange", () => {
    if (document.hidden) clearTimeout(timer);
    else if (refreshS && !paused) load();
  });

  addLocalTimes(document);
  if (refreshS) {
    setInterval(updateAges, 1000);
    scheduleNext();
  }
})();
