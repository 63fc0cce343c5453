// A file as a chat request. The file is read piece by piece and never stands in memory as one string.

/** Divides by three, so that pieces of base64 join without padding between them. */
const PIECE_BYTES = 3 * 256 * 1024;

const base64 = (blob) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });

async function inBase64(file) {
  const pieces = [];
  for (let start = 0; start < file.size; start += PIECE_BYTES) {
    pieces.push(new Blob([await base64(file.slice(start, start + PIECE_BYTES))]));
  }
  return new Blob(pieces);
}

export const isDocument = (file) => file.type === "application/pdf" || /\.(pdf|tiff?)$/i.test(file.name);
export const isPicture = (file) => file.type.startsWith("image/");

/** What is said in a chat whose first question is about the file; `turns` are the earlier questions and answers. */
function messagesOf(part, turns, prompt) {
  const [first, ...others] = [...turns.map(({ question }) => question), prompt];
  const messages = [{ role: "user", content: first ? [{ type: "text", text: first }, part] : [part] }];
  for (const [number, { answer }] of turns.entries()) {
    messages.push({ role: "assistant", content: answer }, { role: "user", content: others[number] });
  }
  return messages;
}

/** The body of a streamed and traced request about a file, for each of `methods` ("" is the server's default). */
export async function requests(file, model, { prompt, frames, tokens }, methods, turns) {
  const mark = "\u0001";
  const url = `data:${isDocument(file) ? "application/pdf" : file.type || "video/mp4"};base64,${mark}`;
  let part = { type: "video_url", video_url: { url } };
  if (isPicture(file)) part = { type: "image_url", image_url: { url } };
  if (isDocument(file)) part = { type: "file", file: { file_data: url, filename: file.name } };
  const encoded = await inBase64(file);
  return methods.map((method) => {
    const slipstream = { trace: true, want_kept: true };
    if (method) slipstream.method = method;
    if (frames && part.type === "video_url") slipstream.num_frames = frames;
    const body = { model, stream: true, messages: messagesOf(part, turns, prompt), slipstream };
    if (tokens) body.max_completion_tokens = tokens;
    const [head, tail] = JSON.stringify(body).split(JSON.stringify(mark).slice(1, -1));
    return new Blob([head, encoded, tail]);
  });
}
