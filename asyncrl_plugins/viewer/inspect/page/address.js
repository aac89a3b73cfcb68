// What is shown, as the page's address says it, and the server's answers.
const Address = (() => {
  "use strict";
  const words = () => new URLSearchParams(location.search);
  const pageNumber = () => Math.max(1, Number.parseInt(words().get("page"), 10) || 1);
  const colouring = (unsaid) => (Tokens.COLOURINGS.includes(words().get("colour")) ? words().get("colour") : unsaid);
  const chosen = () => {
    const [ticket, trajectory] = (words().get("sample") ?? "").split(".");
    return ticket === "" ? null : { ticket, trajectory: trajectory === undefined ? null : Number(trajectory) };
  };
  const addressWith = (changes) => {
    const next = words();
    for (const [name, value] of Object.entries(changes)) {
      if (value === null || value === "") next.delete(name);
      else next.set(name, value);
    }
    return next.size ? `?${next}` : location.pathname;
  };
  const go = (changes, replace = false) => history[replace ? "replaceState" : "pushState"](null, "", addressWith(changes));

  async function fetchJson(path) {
    let answer;
    try {
      answer = await fetch(path, { signal: AbortSignal.timeout(30000) });
    } catch {
      throw new Error("asyncrl inspect does not answer: is it still running in its terminal?");
    }
    const value = await answer.json();
    if (!answer.ok) throw new Error(value.error ?? answer.statusText);
    return value;
  }

  return { words, pageNumber, colouring, chosen, with: addressWith, go, fetchJson };
})();
