"""With any number of file descriptors a program works, or ends with an error that names the limit; it never crashes."""

from harness import PLAIN_LOG, Case, binary, device_env

# From too few for the device's start to plenty.
LIMITS = [10, 12, 13, 14, 18, 256]


class Descriptors(Case):
    def test_too_few_file_descriptors_are_named(self):
        named = 0
        for limit in LIMITS:
            with self.subTest(limit):
                done = self.limited(limit)
                errors = done.ours("E")
                for line in errors:
                    self.assertIn(f"all {limit} file descriptors", line)
                named += bool(errors)
                # Without errors of ours, it is llama.cpp that could not open its model: no memory for the NPU was asked. On a
                # busy machine its logger loses the line that says so when the program ends, so the exit code has to do.
                if not errors and done.code != 0:
                    self.assertEqual(done.code, 1, done.log)
                # One for each graph: that of the warm-up, whose failure llama.cpp passes over, and the prompt's.
                self.assertLessEqual(len(errors), 2)
        self.assertGreater(named, 0, "no limit was too low")
        self.assertLess(named, len(LIMITS), "every limit was too low")

    def limited(self, limit):
        args = ["-m", self.model(), "-p", "The capital of France is", "-n", 4, "-c", 512, "--temp", 0, "-no-cnv",
                "-fit", "off", *PLAIN_LOG]
        name = "llama-completion"
        command = ["sh", "-c", f'ulimit -n {limit}; exec "$0" "$@"', binary(name), *args]
        return self.run_command(name, command, device_env())
