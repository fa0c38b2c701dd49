// Print as JSON what transformers.js answers with exported models: ONNX file → logits of each model, and written tokens.
// Arguments: the folder of the models, and model → texts.
import { env, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer } from '@huggingface/transformers';

const [folder, texts] = process.argv.slice(2);
env.localModelPath = folder;
env.allowRemoteModels = false;
const classes = { classifier: AutoModelForSequenceClassification, writer: AutoModelForCausalLM };
const answers = {};
for (const [file, dtype] of [['model.onnx', 'fp32'], ['model_quantized.onnx', 'q8']]) {
  answers[file] = {};
  for (const [name, some] of Object.entries(JSON.parse(texts))) {
    const tokenizer = await AutoTokenizer.from_pretrained(name);
    const model = await classes[name].from_pretrained(name, { dtype });
    const inputs = tokenizer(some, { padding: true });
    answers[file][name] = (await model(inputs)).logits.tolist();
    if (name === 'writer') {
      const tokens = await model.generate({ ...inputs, max_new_tokens: 12, do_sample: false });
      answers[file].tokens = tokens.tolist().map((row) => row.map(Number));
    }
  }
}
console.log(JSON.stringify(answers));
