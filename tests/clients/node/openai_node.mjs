// openai-node: chat, streams, parse, tools, responses.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const capital = [{ role: "user", content: "What is the capital of France?" }];
const schema = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
// An enumeration: in a free string the embedded model may not find an end.
const chosen = { ...schema, properties: { city: { enum: ["Paris", "Rome"] } } };
const weather = {
  name: "get_weather",
  description: "Get the weather in a city.",
  parameters: schema,
};

const reply = await client.chat.completions.create({ model, messages: capital, temperature: 0 });
assert.match(reply.choices[0].message.content, /Paris/);

let text = "";
for await (const chunk of await client.chat.completions.create({
  model,
  messages: capital,
  temperature: 0,
  stream: true,
})) {
  text += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(text, reply.choices[0].message.content);

const runner = client.chat.completions.stream({
  model,
  messages: [{ role: "user", content: "What is the weather in Paris?" }],
  tools: [{ type: "function", function: weather }],
  temperature: 0,
});
const called = await runner.finalChatCompletion();
assert.deepEqual(JSON.parse(called.choices[0].message.tool_calls[0].function.arguments), {
  city: "Paris",
});

const shaped = await client.chat.completions.parse({
  model,
  messages: capital,
  temperature: 0,
  max_tokens: 100,
  response_format: {
    type: "json_schema",
    json_schema: { name: "city", strict: true, schema: chosen },
  },
});
assert.ok(["Paris", "Rome"].includes(shaped.choices[0].message.parsed.city));

const response = await client.responses.create({
  model,
  input: "What is the capital of France?",
  temperature: 0,
});
assert.match(response.output_text, /Paris/);
const kinds = [];
for await (const event of await client.responses.create({
  model,
  input: "What is the capital of France?",
  temperature: 0,
  stream: true,
})) {
  kinds.push(event.type);
}
assert.equal(kinds.at(0), "response.created");
assert.equal(kinds.at(-1), "response.completed");

await assert.rejects(
  client.chat.completions.create({ model, messages: capital, temperature: 9 }),
  OpenAI.BadRequestError,
);
