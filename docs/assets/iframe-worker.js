// SPDX-License-Identifier: Apache-2.0
//
// Browsers start no workers for pages of the file system. The search is one, so there
// it runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.worker = frame.contentWindow;
      // What the worker posts arrives here, as if from a worker.
      this.worker.postMessage = (data) =>
        setTimeout(() => {
          const event = new MessageEvent("message", { data });
          this.dispatchEvent(event);
          if (this.onmessage) this.onmessage(event);
        });
      this.worker.importScripts = (...urls) =>
        urls.reduce((before, url) => before.then(() => this.load(url)), Promise.resolve());
      this.ready = this.load(url);
    }

    load(url) {
      return new Promise((loaded, failed) => {
        const script = this.worker.document.createElement("script");
        script.src = new URL(url, location.href).href;
        script.onload = loaded;
        script.onerror = failed;
        this.worker.document.body.appendChild(script);
      });
    }

    postMessage(data) {
      this.ready.then(() =>
        this.worker.dispatchEvent(new MessageEvent("message", { data }))
      );
    }

    terminate() {
      this.worker.frameElement.remove();
    }
  };
}
