"""scripts/sentences.py: its counting and its findings."""

from harness import Case

import sentences

LONG = " ".join(["word"] * 31)


class Findings(Case):
    def lines(self, text):
        return [line for line, _ in sentences.findings(text)]

    def test_long_sentence_is_found_by_its_paragraphs_line(self):
        self.assertEqual(self.lines(f"# Title\n\nShort.\n\n- A point.\n- {LONG[:60]}\n  {LONG[60:]}.\n"), [6])
        self.assertEqual(self.lines(f"| a | {LONG} |\n"), [1])

    def test_code_titles_and_names_in_capitals_are_no_words(self):
        code = f"```sh\n{LONG}\n```\n"
        self.assertEqual(self.lines(f"{code}# {LONG}\n\nTypes: {'Q4_0, MUL_MAT, ' * 20}and `{LONG}`.\n"), [])
        self.assertEqual(self.lines(f"{code}\n{LONG}\n"), [5])
        self.assertEqual(self.lines(f"SOURCE: {LONG}\n\n| a | {LONG[:60]}; {LONG[60:]} |\n"), [])

    def test_two_sentences_of_half_the_length_are_fine(self):
        half = " ".join(["word"] * 16)
        self.assertEqual(self.lines(f"{half}. {half}.\n"), [])
        self.assertEqual(self.lines(f"{half}, {half}.\n"), [1])

    def test_avoided_words_are_found_with_what_to_write(self):
        self.assertEqual(list(sentences.findings("It is made Anew.\n")), [(1, '"Anew": again')])
        self.assertEqual(self.lines("A canewood chair.\n"), [])
