"""A server with the interface of llama-server whose text follows from a hash of the request: the same on every run.

It can simulate failures: to end without an answer, to answer with something else, slowly, or that it has no slot.

Usage: scripted_server.py ARGUMENTS     as a program in place of llama-server, which writes its arguments, as a line of JSON
after its process id, to the file that SCRIPTED_LOG names, and ends after SCRIPTED_ENDS requests.
"""

import hashlib
import json
import os
import re
import sys
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def number(*parts):
    """A number that depends on the parts alone."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big")


def completion(prompt, seed, stop, levels=1000, ends=3):
    """A few words, and an answer or the end of a step.

    levels: how many logarithms of probabilities there are; 1 makes every score the same
    ends: one step of so many ends the text
    """
    value = number("text", prompt, seed)
    logprobs = [-(number("logprob", prompt, seed, i) % levels + 1) / 400 for i in range(1 + value % 5)]
    if stop and value % ends:
        text, why = f"Step with {value % 7}." if value % 13 else f"So \\boxed{{{value % 4}}}.", "word"
    elif value % 11 == 0:
        text, why = "No idea", "limit"
    else:
        text, why = f"It is \\boxed{{{value % 4}}}", "eos"
    tokens = [{"id": 1, "token": "x", "logprob": each,
               "top_logprobs": [{"id": 1, "token": "x", "logprob": each}, {"id": 2, "token": "y", "logprob": each - 1}]}
              for each in logprobs]
    # As in llama-server, the tokens of a stop word are counted but not listed.
    return {"content": text, "tokens_predicted": len(tokens) + (why == "word"), "stop_type": why,
            "completion_probabilities": tokens}


def tokenize(text):
    """Tokens of a vocabulary that has one for a full stop with a line feed, as Qwen2's has."""
    return [number("token", piece) % 30000 for piece in re.findall(r"\.\n|\w+|\W", text)]


def states(tokens):
    """The last hidden state of each token, two numbers: it depends on all tokens up to this one."""
    return [[number("state", i, tokens[:end]) % 1000 / 500 - 1 for i in range(2)] for end in range(1, len(tokens) + 1)]


class Scripted:
    """The server's behaviour, and its recorded requests."""

    def __init__(self, slots):
        self.slots = slots
        self.requests = []
        self.fault = None
        self.fault_after = 0
        self.delay = 0.0
        self.lock = threading.Lock()
        self.url = ""
        self.model = "scripted.gguf"
        self.options = {}

    def completion(self, prompt, seed, stop):
        return completion(prompt, seed, stop, **self.options)

    def answer(self, path, body):
        if path == "/health":
            return 200, {"status": "ok"}
        if path == "/props":
            return 200, {"total_slots": self.slots, "model_path": f"folder/{self.model}"}
        if path == "/apply-template":
            return 200, {"prompt": f"<user>{body['messages'][0]['content']}<assistant>"}
        if path == "/tokenize":
            return 200, {"tokens": [1] * body["add_special"] + tokenize(body["content"])}
        if path == "/embedding":
            tokens, = body["content"]
            return 200, [{"index": 0, "embedding": states(tokens)}]
        if path != "/completion":
            return 404, {"error": {"message": "File Not Found"}}
        with self.lock:
            self.requests.append(body)
            is_faulty = self.fault and len(self.requests) > self.fault_after
        time.sleep(self.delay)
        if is_faulty:
            return self.fault
        n = body["n_cmpl"]
        if n > self.slots:
            return 400, {"error": {"message": f"n_cmpl must be at most {self.slots}"}}
        found = [self.completion(body["prompt"], body["seed"] + i, body["stop"]) for i in range(n)]
        return 200, found if n > 1 else found[0]


@contextmanager
def scripted_server(slots=4, port=0, state=None):
    """Runs the server on a free port, unless one is given."""
    state = state or Scripted(slots)

    class Handler(BaseHTTPRequestHandler):
        def reply(self, body):
            status, answer = state.answer(self.path, body)
            if status == 0:
                # Simulates a crash: the connection ends without an answer.
                self.connection.close()
                return
            text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_GET(self):
            self.reply(None)

        def do_POST(self):
            self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def handle(self):
            # The client may have been killed already.
            with suppress(OSError):
                super().handle()

        def finish(self):
            with suppress(OSError, ValueError):
                super().finish()

        def log_message(self, *_):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    httpd.daemon_threads = True
    state.url = f"http://127.0.0.1:{httpd.server_port}"
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        httpd.shutdown()
        httpd.server_close()


class Ending(Scripted):
    """Ends the process in the middle of a request."""

    def answer(self, path, body):
        if path == "/completion" and len(self.requests) >= int(os.environ.get("SCRIPTED_ENDS", "1000000")):
            sys.stderr.write("out of memory\nthis is the end\n")
            sys.stderr.flush()
            os._exit(3)
        return super().answer(path, body)


def main():
    arguments = sys.argv[1:]
    with open(os.environ["SCRIPTED_LOG"], "a", encoding="utf-8") as log:
        log.write(json.dumps([os.getpid(), *arguments]) + "\n")
    slots, port = (int(arguments[arguments.index(name) + 1]) for name in ("-np", "--port"))
    state = Ending(slots)
    state.delay = float(os.environ.get("SCRIPTED_DELAY", "0.05"))
    with scripted_server(port=port, state=state):
        threading.Event().wait()


if __name__ == "__main__":
    main()
