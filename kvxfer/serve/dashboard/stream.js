// What the router tells, as parts by name; it connects again by itself, for as long as it takes.

const SILENCE_MS = 4000; // the router says something four times a second
const RETRY_MS = [500, 1000, 2000, 4000];

export class Stream {
  // `changed(parts, now_s)` after each event, `turned(state, since_ms)` when it is lost or found.
  constructor(url, changed, turned) {
    this.url = url;
    this.changed = changed;
    this.turned = turned;
    this.parts = new Map();
    this.heardAt = performance.now();
    this.failures = 0;
    this.isFresh = true;
    setInterval(() => this.look(), 1000);
    this.open();
  }

  open() {
    clearTimeout(this.timer);
    this.source?.close();
    this.openedAt = performance.now();
    this.isFresh = true;
    this.source = new EventSource(this.url);
    this.source.onmessage = (event) => this.take(JSON.parse(event.data));
    this.source.onerror = () => this.fail();
  }

  take(event) {
    this.heardAt = performance.now();
    this.failures = 0;
    if (this.isFresh) this.parts = new Map(); // the first event has everything
    this.isFresh = false;
    for (const name of event.gone) this.parts.delete(name);
    for (const [name, part] of Object.entries(event.parts)) this.parts.set(name, part);
    this.turned("live", 0);
    this.changed(this.parts, event.now_s);
  }

  fail() {
    this.source.close();
    const pause = RETRY_MS[Math.min(this.failures, RETRY_MS.length - 1)];
    this.failures += 1;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.open(), pause);
    this.turned("lost", performance.now() - this.heardAt);
  }

  look() {
    const silence = performance.now() - Math.max(this.heardAt, this.openedAt);
    if (this.failures || silence > SILENCE_MS) {
      this.turned("lost", performance.now() - this.heardAt);
      if (this.source.readyState !== EventSource.CLOSED && silence > SILENCE_MS) this.fail();
    }
  }
}
