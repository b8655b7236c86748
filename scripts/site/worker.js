/* SPDX-License-Identifier: Apache-2.0
 *
 * Search in pages that are opened as files: browsers start no worker there, so the worker's script runs in a hidden frame.
 * The theme looks for IFrameWorker to know that importScripts returns a promise.
 */
if (location.protocol === "file:") {
    const load = (inside, url) => new Promise((done, failed) => {
        const script = inside.document.createElement("script");
        script.src = url;
        script.onload = done;
        script.onerror = failed;
        inside.document.head.append(script);
    });
    window.IFrameWorker = window.Worker = class extends EventTarget {
        constructor(url) {
            super();
            const frame = document.createElement("iframe");
            frame.hidden = true;
            document.body.append(frame);
            this.inside = frame.contentWindow;
            this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
            this.inside.importScripts = (...urls) => Promise.all(urls.map((each) => load(this.inside, new URL(each, url))));
            this.ready = load(this.inside, url);
        }
        postMessage(data) {
            this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
        }
    };
}
