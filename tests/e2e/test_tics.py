"""scripts/tics.py: its counting and its findings."""

from harness import Case

import tics


class Findings(Case):
    def test_frequent_word_is_found_with_its_rate_and_limit(self):
        lines = ["It takes two, and took three."] + ["A plain line."] * 99
        self.assertEqual(list(tics.findings(lines)), [("takes", 20.0, 8.0)])
        self.assertEqual(list(tics.findings(lines + ["A plain line."] * 200)), [])

    def test_code_and_longer_words_do_not_count(self):
        self.assertEqual(tics.uses("takes", ["`takes` and mistaken"]), [])
        self.assertEqual(tics.uses("is no", ["It is not so, it is nowhere."]), [])

    def test_comments_alone_are_read(self):
        self.assertEqual(tics.rust_comments("/// One.\n    //! Two.\nlet takes = 1; // not this\n// Three.\n"),
                         [" One.", " Two.", " Three."])
        self.assertEqual(tics.python_comments('"""One."""\n\nTAKES = "takes"  # Two.\n'), ["One.", "Two."])
