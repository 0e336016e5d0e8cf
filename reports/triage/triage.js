"use strict";
// The page works without this. With it, the page follows its targets: its own address is fetched
// again and only what differs is changed, so that focus, selection, scroll and open lists stay.
(() => {
  const ASKED_FOR_MS = 15000;
  const SLOWEST_S = 30;
  const refreshS = Number(document.body.dataset.refresh) || 0;
  const connection = document.getElementById("connection");
  let seenMs = performance.now();
  let failures = 0;
  let lostSince = null;
  let paused = false;
  let asking = false;
  let timer = 0;

  document.documentElement.classList.add("js");

  const span = (seconds) => {
    if (seconds < 120) return `${Math.max(0, seconds).toFixed(0)} s`;
    if (seconds < 7200) return `${(seconds / 60).toFixed(0)} min`;
    return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} days`;
  };

  // What only the reader's machine knows: the local time.
  const dress = (page) => {
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
    const mine = (name) => name === "open" && old.nodeName === "DETAILS";
    for (const { name } of [...old.attributes]) {
      if (!fresh.hasAttribute(name) && !mine(name)) old.removeAttribute(name);
    }
    for (const { name, value } of fresh.attributes) {
      if (old.getAttribute(name) !== value && !mine(name)) old.setAttribute(name, value);
    }
  };

  // Children with an id are found by it, the others by their place.
  const patchChildren = (old, fresh) => {
    let at = old.firstChild;
    for (const child of [...fresh.childNodes]) {
      const known = child.id ? [...old.children].find((one) => one.id === child.id) : null;
      if (known && known !== at) old.insertBefore(known, at);
      const twin = known || (at && !at.id && !child.id ? at : null);
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
      throw new Error("the answer is not this page; you may have to sign in again");
    }
    dress(page);
    old.forEach((part, place) => patch(part, fresh[place]));
    document.title = page.title;
    const icon = page.querySelector("link[rel=icon]");
    if (icon) document.querySelector("link[rel=icon]").href = icon.getAttribute("href");
  };

  const tell = (kind, words) => {
    if (connection.className !== `connection ${kind}`) connection.className = `connection ${kind}`;
    if (connection.textContent !== words) connection.textContent = words;
    document.documentElement.classList.toggle("is-lost", kind === "lost");
  };

  const load = async () => {
    if (asking) return;
    asking = true;
    try {
      const answer = await fetch(location.href, {
        headers: { Accept: "text/html" },
        cache: "no-store",
        signal: AbortSignal.timeout(ASKED_FOR_MS),
      });
      if (!answer.ok) throw new Error(`kneewatch answers with status ${answer.status}`);
      const text = await answer.text();
      if (!paused) {
        show(text);
        seenMs = performance.now();
        tell("", "");
      }
      failures = 0;
      lostSince = null;
    } catch (error) {
      failures += 1;
      lostSince ??= new Date();
      const why = error.name === "TypeError" ? "no answer" : error.message;
      if (!paused) {
        tell("lost", `Connection to kneewatch lost at ${lostSince.toLocaleTimeString()}, your time (${why}). `
          + "What you see is the last that came; it is tried again.");
      }
    }
    asking = false;
    plan();
  };

  const plan = () => {
    clearTimeout(timer);
    if (!refreshS || paused || document.hidden) return;
    const waitS = Math.min(refreshS * 2 ** failures, Math.max(refreshS, SLOWEST_S));
    timer = setTimeout(load, 1000 * waitS);
  };

  // Ages grow between two answers, by the reader's own clock and whatever it is set to.
  const grow = () => {
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
      // Pages that did not come over TLS have no clipboard; a selection can be copied all the same.
      const box = document.createElement("textarea");
      box.value = words;
      box.readOnly = true;
      button.after(box);
      box.select();
      const done = document.execCommand("copy");
      box.remove();
      button.focus();
      if (!done) {
        button.textContent = "Select it and copy";
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
      button.textContent = paused ? "Go on" : "Pause";
      button.setAttribute("aria-pressed", String(paused));
      tell(paused ? "paused" : "", paused ? "Paused: the page does not follow any more." : "");
      if (paused) clearTimeout(timer); else load();
    }
  });

  document.addEventListener("visibilitychange", () => {
    if (document.hidden) clearTimeout(timer);
    else if (refreshS && !paused) load();
  });

  dress(document);
  if (refreshS) {
    setInterval(grow, 1000);
    plan();
  }
})();
