// What an empty conversation offers: [name, message]. Answers that repeat their prompt gain most by drafts; the story,
// which repeats nothing, shows what is left without.
export const STARTERS = [
  ["Correct the spelling", "Correct the spelling: The lighthose was built in 1874 after three ships were lost in one winter."],
  ["Summarize a text", "Summarize: The lighthouse was built in 1874 after three ships were lost in one winter. For sixty years its lamp burned whale oil."],
  ["Extract names", "Extract the names: Ada Lovelace met Charles Babbage in 1833. Mary Somerville introduced them."],
  ["A story, where drafts gain little", "Tell me a story about a lighthouse."],
];

// What the editors offer to begin with: the examples of the documentation and of the grammar library.

const RECIPE = {
  type: "object",
  properties: {
    name: { type: "string", maxLength: 40 },
    course: { enum: ["starter", "main", "dessert"] },
    minutes: { type: "integer", minimum: 1, maximum: 240 },
    ingredients: { type: "array", items: { type: "string" }, minItems: 1, maxItems: 4 },
  },
  required: ["name", "course", "minutes", "ingredients"],
};

const CITY = {
  type: "object",
  properties: {
    name: { type: "string" },
    country: { type: "string" },
    language: { type: "string" },
    is_capital: { type: "boolean" },
  },
  required: ["name", "country", "language", "is_capital"],
};

const WEATHER = {
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather in a city.",
    parameters: {
      type: "object",
      properties: { city: { enum: ["Rome", "Oslo"] }, days: { type: "integer", minimum: 1, maximum: 9 } },
      required: ["city", "days"],
      additionalProperties: false,
    },
  },
};

const readable = (value) => JSON.stringify(value, null, 2);
const DATE = String.raw`(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)`;
const ARITHMETIC = String.raw`root ::= sum
sum ::= product ( " "? [-+] " "? product )*
product ::= factor ( " "? [*/] " "? factor )*
factor ::= "-"? atom
atom ::= number | "(" sum ")"
number ::= ( "0" | [1-9] [0-9]{0,14} ) ( "." [0-9]{1,15} )?
`;

// [name, kind of format, text, message that asks for it]
export const FORMATS = [
  ["A recipe (JSON Schema)", "json_schema", readable(RECIPE), "Give me a recipe for pancakes as JSON."],
  ["A city (JSON Schema)", "json_schema", readable(CITY), "Describe Paris as JSON."],
  ["Yes or no (choice)", "choice", "yes\nno", "Is the sky blue?"],
  ["A date (regular expression)", "regex", DATE, "When did the first person walk on the moon?"],
  ["Arithmetic (grammar)", "grammar", ARITHMETIC, "Write a sum of three numbers."],
];

// [name, tools, tool_choice, message]
export const TOOLS = [
  ["The weather in a city", readable([WEATHER]), "required", "Will it rain in Oslo in the next 3 days?"],
];
