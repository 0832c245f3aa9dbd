"""Programs of other tools as tasks: LightningModules, and what a Hugging Face Trainer is called with."""
