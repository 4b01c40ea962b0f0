"""Several contexts on several threads share one device: llama.cpp's own test-thread-safety passes."""

from harness import DEVICE, Case, device_env


class Threads(Case):
    def test_thread_safety(self):
        done = self.succeed("test-thread-safety", "-m", self.model(), "-ngl", 99, "-p", "The meaning of life is",
                            "-n", 32, "-c", 256, "-ub", 32, "-np", 2, "-t", 2, "-v", env=device_env())
        self.assertIn("All threads finished without errors", done.all)
        self.assertIn(f"{DEVICE}_PACKED model buffer size", done.all)
