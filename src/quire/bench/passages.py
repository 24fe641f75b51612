"""Texts that benchmarks ask about: passages to quote from, questions to answer freely."""

PASSAGES = (
    "The lighthouse on the northern cape was built in 1874, after three ships were lost in a single winter. Its "
    "lamp burned rapeseed oil until 1911, when a paraffin burner took its place, and electricity came only in "
    "1953. The keeper and his family lived in a low stone house beside the tower and kept goats, hens and a small "
    "garden behind a wall that shut out the wind. Supplies arrived twice a month by boat, if the sea allowed it. "
    "In 1986 the light was automated and the last keeper, Anna Holm, moved to the village. She still climbs the "
    "tower every spring to count the nests on the gallery.",
    "A paged memory manager divides the space of each program into blocks of equal size. A block need not lie next "
    "to the one before it: a table says where each block is kept. When a program grows, the manager gives it one "
    "more block from a list of free ones, so that no large piece of memory has to be found. When two programs hold "
    "the same content, both tables may name the same block, and the block is copied only when one of them writes "
    "to it. The price is one look into the table for every access, which hardware makes almost free.",
    "To make the bread, mix 500 grams of flour with 350 grams of water and let it rest for half an hour. Add 10 "
    "grams of salt and 100 grams of ripe starter, and fold the dough every thirty minutes for two hours. Shape it "
    "into a ball, place it in a floured basket and leave it in the refrigerator overnight. Heat the oven to 250 "
    "degrees with an iron pot inside. Bake the loaf in the closed pot for 25 minutes and without the lid for "
    "another 20 minutes, until the crust is dark brown. Let it cool on a rack for at least an hour.",
)

QUESTIONS = (
    "What should I look at first when I visit a city that I do not know?",
    "Explain in simple words why the sky is blue.",
    "Write a short story about a clock that runs backwards.",
    "How does a bicycle stay upright?",
    "Give me three ideas for a birthday party in the garden.",
    "What is the difference between weather and climate?",
    "Describe how a letter travelled from one town to another two hundred years ago.",
    "Why do cats purr?",
)
