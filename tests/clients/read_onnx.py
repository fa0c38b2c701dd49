"""Print as JSON what optimum-onnx answers with exported models: ONNX file → logits of each model, and written tokens.

It imports nothing of Eckart, because it runs with the older transformers that optimum-onnx needs.
Arguments: the folder of the models, and model → texts.
"""

import json
import sys
from pathlib import Path

from optimum.onnxruntime import ORTModelForCausalLM, ORTModelForSequenceClassification
from transformers import AutoTokenizer

folder, texts = Path(sys.argv[1]), json.loads(sys.argv[2])
classes = {"classifier": ORTModelForSequenceClassification, "writer": ORTModelForCausalLM}
answers = {}
for file in ("model.onnx", "model_quantized.onnx"):
    answers[file] = {}
    for name, some in texts.items():
        inputs = AutoTokenizer.from_pretrained(folder / name)(some, padding=True, return_tensors="pt")
        model = classes[name].from_pretrained(folder / name, subfolder="onnx", file_name=file)
        answers[file][name] = model(**inputs).logits.tolist()
        if name == "writer":
            answers[file]["tokens"] = model.generate(**inputs, max_new_tokens=12, do_sample=False).tolist()
print(json.dumps(answers))
