//! Answers compared with the OpenAPI document that the gateway serves.

use serde_json::Value;

/// A served document.
pub struct Document(Value);

impl Document {
    /// The document of a gateway.
    pub fn of(document: Value) -> Self {
        assert!(document["openapi"].as_str().is_some_and(|version| version.starts_with("3.1")), "{document}");
        Document(document)
    }

    /// Checks an answer to a method of a path under the base (with or without its query) against what the document says
    /// of it.
    ///
    /// # Panics
    /// If the document does not know the operation, or says something else of the answer.
    pub fn check(&self, method: &str, path: &str, status: u16, body: &Value) {
        let operation = self.operation(method, path);
        let responses = &operation["responses"];
        let named = &responses[status.to_string()];
        let response = if named.is_null() { &responses["default"] } else { named };
        let schema = &response["content"]["application/json"]["schema"];
        assert!(schema.is_object(), "{method} {path}: status {status} is not in the document");
        if let Err(why) = self.fits(schema, body, "answer") {
            panic!("{method} {path}: status {status}: {why}\n{body}");
        }
    }

    /// Whether a document fits one of the named schemas.
    pub fn names(&self, schema: &str, value: &Value) -> Result<(), String> {
        self.fits(&self.0["components"]["schemas"][schema], value, schema)
    }

    /// Every operation: its method and path.
    pub fn operations(&self) -> Vec<(String, String)> {
        let paths = self.0["paths"].as_object().expect("paths");
        let of_path = |(path, methods): (&String, &Value)| {
            let methods = methods.as_object().expect("methods").keys();
            methods.map(|method| (method.clone(), path.clone())).collect::<Vec<_>>()
        };
        paths.iter().flat_map(of_path).collect()
    }

    fn operation(&self, method: &str, path: &str) -> &Value {
        let asked: Vec<&str> = path.split('?').next().unwrap_or_default().split('/').collect();
        let fits = |template: &str| {
            let parts: Vec<&str> = template.split('/').collect();
            parts.len() == asked.len()
                && parts.iter().zip(&asked).all(|(part, asked)| part.starts_with('{') || part == asked)
        };
        let paths = self.0["paths"].as_object().expect("paths");
        // A path that is there as it is comes before one with names in it.
        let mut found: Vec<_> = paths.iter().filter(|(template, _)| fits(template)).collect();
        found.sort_by_key(|(template, _)| template.matches('{').count());
        let (_, methods) = found.first().unwrap_or_else(|| panic!("{path} is not in the document"));
        let operation = &methods[method.to_ascii_lowercase()];
        assert!(operation.is_object(), "{method} {path} is not in the document");
        operation
    }

    fn fits(&self, schema: &Value, value: &Value, at: &str) -> Result<(), String> {
        if let Some(name) = schema["$ref"].as_str() {
            let name = name.rsplit('/').next().expect("a name");
            return self.fits(&self.0["components"]["schemas"][name], value, at);
        }
        if let Some(any) = schema["anyOf"].as_array() {
            return match any.iter().any(|schema| self.fits(schema, value, at).is_ok()) {
                true => Ok(()),
                false => Err(format!("{at} fits none of {schema}")),
            };
        }
        let kinds: Vec<&str> = match &schema["type"] {
            Value::String(kind) => vec![kind],
            Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect(),
            _ => Vec::new(),
        };
        if !kinds.is_empty() && !kinds.iter().any(|kind| is_a(value, kind)) {
            return Err(format!("{at} is no {kinds:?}: {value}"));
        }
        if let Some(values) = schema["enum"].as_array().filter(|values| !values.contains(value)) {
            return Err(format!("{at} is none of {values:?}: {value}"));
        }
        let (min, max) = (schema["minimum"].as_i64(), schema["maximum"].as_i64());
        if let Some(number) = value.as_i64()
            && (min.is_some_and(|min| number < min) || max.is_some_and(|max| number > max))
        {
            return Err(format!("{at} is not within {min:?} to {max:?}: {value}"));
        }
        for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            if value.get(name).is_none() {
                return Err(format!("{at} lacks {name}"));
            }
        }
        for (name, schema) in schema["properties"].as_object().into_iter().flatten() {
            if let Some(member) = value.get(name) {
                self.fits(schema, member, &format!("{at}.{name}"))?;
            }
        }
        if schema["items"].is_object() {
            for (number, item) in value.as_array().into_iter().flatten().enumerate() {
                self.fits(&schema["items"], item, &format!("{at}[{number}]"))?;
            }
        }
        Ok(())
    }
}

fn is_a(value: &Value, kind: &str) -> bool {
    match kind {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "integer" => value.is_u64() || value.is_i64(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        other => panic!("the document has a type that this test does not know: {other}"),
    }
}
