"""With any number of file descriptors a program works, or ends with an error about them; it never crashes."""

from harness import PLAIN_LOG, Case, binary, device_env

# From too few descriptors for the model to more than enough.
LIMITS = [5, 6, 7, 8, 10, 13, 256]


class Descriptors(Case):
    def test_with_too_few_file_descriptors_the_text_is_right_or_an_error_is_named(self):
        """Cached objects of earlier calls are freed for the next call, so few descriptors are enough; tests/descriptors.rs
        has fewer."""
        plenty = self.limited(LIMITS[-1])
        self.assertEqual(plenty.code, 0, plenty.log)
        right = 0
        for limit in LIMITS[:-1]:
            with self.subTest(limit):
                done = self.limited(limit)
                errors = done.ours("E")
                for line in errors:
                    self.assertIn(f"too few of the {limit} file descriptors", line)
                # One error for each graph: the warm-up's, whose failure llama.cpp ignores, and the prompt's.
                self.assertLessEqual(len(errors), 2)
                if done.code == 0 and not errors:
                    self.assertEqual(done.out, plenty.out)
                    right += 1
                elif not errors:
                    # llama.cpp could not open its model. On a busy machine its logger loses that line when the program ends, so
                    # only the exit code is checked.
                    self.assertEqual(done.code, 1, done.log)
        self.assertGreater(right, 0, "no limit was enough")
        self.assertLess(right, len(LIMITS) - 1, "no limit was too low")

    def limited(self, limit):
        args = ["-m", self.model(), "-p", "The capital of France is", "-n", 4, "-c", 512, "--temp", 0, "-no-cnv",
                "-fit", "off", *PLAIN_LOG]
        name = "llama-completion"
        command = ["sh", "-c", f'ulimit -n {limit}; exec "$0" "$@"', binary(name), *args]
        return self.with_end(lambda: self.run_command(name, command, device_env()))
