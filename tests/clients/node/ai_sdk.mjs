// Vercel AI SDK: the openai-compatible provider (chat) and the openai one (responses).
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
const providers = {
  compatible: createOpenAICompatible({
    name: "quire",
    baseURL: `${url}/v1`,
    apiKey: "none",
    supportsStructuredOutputs: true,
  })(name),
  responses: createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" })(name),
};
const question = "What is the capital of France?";

for (const [kind, model] of Object.entries(providers)) {
  const common = { model, temperature: 0, maxRetries: 0, maxOutputTokens: 200 };
  const reply = await generateText({ ...common, prompt: question });
  assert.match(reply.text, /Paris/, kind);
  assert.ok(reply.usage.inputTokens > 0, kind);

  const stream = streamText({ ...common, prompt: question });
  let text = "";
  for await (const part of stream.textStream) text += part;
  assert.equal(text, reply.text, kind);

  const cities = [];
  await generateText({
    ...common,
    prompt: "What is the weather in Paris?",
    tools: {
      get_weather: tool({
        description: "Get the weather in a city.",
        inputSchema: z.object({ city: z.string() }),
        execute: async ({ city }) => {
          cities.push(city);
          return "sunny";
        },
      }),
    },
    stopWhen: stepCountIs(2),
  });
  assert.deepEqual(cities, ["Paris"], kind);

  const shaped = await generateObject({
    ...common,
    prompt: question,
    schema: z.object({ country: z.enum(["France", "Italy"]), capital: z.enum(["Paris", "Rome"]) }),
  });
  assert.equal(typeof shaped.object.capital, "string", kind);
}
