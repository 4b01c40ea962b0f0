//! The value of an expression, in LaTeX or plain.

use super::token::{Token, tokens};

/// Sets of numbers for the letters of an expression.
pub const POINTS: usize = 3;

/// Deepest nesting of brackets, powers and arguments.
const MAX_DEPTH: usize = 60;

type Points = [f64; POINTS];

/// Evaluates an expression; `None` if the text is not an expression.
///
/// Letters have fixed values, so that equal expressions have equal values. Words after a number are
/// its unit and are skipped.
pub fn evaluate(text: &str) -> Option<Points> {
    let mut parser = Parser {
        tokens: tokens(text)?,
        at: 0,
        depth: 0,
    };
    let values = parser.sum()?;
    let is_finite = values.iter().all(|value| value.is_finite());
    (parser.at == parser.tokens.len() && is_finite).then_some(values)
}

struct Parser {
    tokens: Vec<Token>,
    at: usize,
    depth: usize,
}

fn map2(a: Points, b: Points, op: impl Fn(f64, f64) -> f64) -> Points {
    std::array::from_fn(|i| op(a[i], b[i]))
}

impl Parser {
    fn sign(&self) -> Option<char> {
        match self.tokens.get(self.at) {
            Some(Token::Sign(c)) => Some(*c),
            _ => None,
        }
    }

    fn take(&mut self, sign: char) -> bool {
        let found = self.sign() == Some(sign);
        self.at += usize::from(found);
        found
    }

    /// Parses a nested part. All recursion goes through this function, which returns `None` beyond
    /// the deepest allowed level.
    fn nested(&mut self, parse: impl FnOnce(&mut Self) -> Option<Points>) -> Option<Points> {
        if self.depth == MAX_DEPTH {
            return None;
        }
        self.depth += 1;
        let found = parse(self);
        self.depth -= 1;
        found
    }

    /// sum = ["-"] product {("+" | "-") product}
    fn sum(&mut self) -> Option<Points> {
        let mut sum = self.signed()?;
        loop {
            if self.take('+') {
                sum = map2(sum, self.product()?, |a, b| a + b);
            } else if self.take('-') {
                sum = map2(sum, self.product()?, |a, b| a - b);
            } else {
                return Some(sum);
            }
        }
    }

    fn signed(&mut self) -> Option<Points> {
        if self.take('-') {
            return Some(self.product()?.map(|x| -x));
        }
        self.take('+');
        self.product()
    }

    /// product = power {["*" | "/"] power}; a fraction after an integer is added to it.
    fn product(&mut self) -> Option<Points> {
        let is_integer =
            matches!(self.tokens.get(self.at), Some(Token::Number(x)) if x.fract() == 0.0);
        let mut product = self.power()?;
        if is_integer && self.is_fraction_of_numbers() {
            product = map2(product, self.power()?, |a, b| a + b);
        }
        loop {
            if self.take('*') {
                // 2 ** 3
                if self.take('*') {
                    product = map2(product, self.power()?, f64::powf);
                } else {
                    let factor = self.factor()?;
                    product = map2(product, factor, |a, b| a * b);
                }
            } else if self.take('/') {
                let divisor = self.factor()?;
                product = map2(product, divisor, |a, b| a / b);
            } else if self.begins_factor() {
                product = map2(product, self.power()?, |a, b| a * b);
            } else {
                return Some(product);
            }
        }
    }

    /// A factor after a sign may have another sign.
    fn factor(&mut self) -> Option<Points> {
        if self.take('-') {
            return Some(self.power()?.map(|x| -x));
        }
        self.power()
    }

    fn is_fraction_of_numbers(&self) -> bool {
        use Token::{Command, Number, Sign};
        let rest = self.tokens.get(self.at..).unwrap_or_default();
        matches!(rest, [Command(name), Sign('{'), Number(_), Sign('}'), Sign('{'), Number(_), Sign('}'), ..] if name == "frac")
    }

    fn begins_factor(&self) -> bool {
        match self.tokens.get(self.at) {
            Some(Token::Sign(c)) => matches!(c, '(' | '{'),
            Some(Token::Number(_)) => false,
            Some(_) => true,
            None => false,
        }
    }

    /// power = atom ["!"] ["^" atom]
    fn power(&mut self) -> Option<Points> {
        let mut base = self.atom()?;
        if self.take('!') {
            base = base.map(factorial);
        }
        if !self.take('^') {
            return Some(base);
        }
        let exponent = if self.take('-') {
            self.nested(Self::power)?.map(|x| -x)
        } else {
            self.nested(Self::power)?
        };
        Some(map2(base, exponent, f64::powf))
    }

    fn group(&mut self, close: char) -> Option<Points> {
        let inner = self.nested(Self::sum)?;
        self.take(close).then_some(inner)
    }

    /// The argument of a command: a group, or one digit, letter or command.
    fn argument(&mut self) -> Option<Points> {
        if self.take('{') {
            return self.group('}');
        }
        // \frac12 is one half: each digit is a separate argument.
        if let Some(Token::Number(x)) = self.tokens.get(self.at)
            && x.fract() == 0.0
            && *x >= 10.0
        {
            let digits = x.to_string();
            let (first, rest) = digits.split_at(1);
            let first = first.parse().ok()?;
            self.tokens[self.at] = Token::Number(rest.parse().ok()?);
            return Some([first; POINTS]);
        }
        self.atom()
    }

    fn atom(&mut self) -> Option<Points> {
        let token = self.tokens.get(self.at)?.clone();
        self.at += 1;
        match token {
            Token::Number(x) => Some([x; POINTS]),
            Token::Letter('e') => Some([std::f64::consts::E; POINTS]),
            Token::Letter(c) => Some(letter(&c.to_string())),
            Token::Sign('(') => self.group(')'),
            Token::Sign('{') => self.group('}'),
            Token::Sign('[') => self.group(']'),
            Token::Sign('|') => Some(self.group('|')?.map(f64::abs)),
            Token::Sign(_) => None,
            Token::Command(name) => self.nested(|parser| parser.command(&name)),
        }
    }

    fn command(&mut self, name: &str) -> Option<Points> {
        let function: fn(f64) -> f64 = match name {
            "pi" => return Some([std::f64::consts::PI; POINTS]),
            "frac" => {
                let above = self.argument()?;
                let below = self.argument()?;
                return Some(map2(above, below, |a, b| a / b));
            }
            "binom" => {
                let above = self.argument()?;
                let below = self.argument()?;
                let ratio = |n: f64, k: f64| factorial(n) / factorial(k) / factorial(n - k);
                return Some(map2(above, below, |n, k| ratio(n, k).round()));
            }
            "sqrt" => return self.root(),
            "sin" => f64::sin,
            "cos" => f64::cos,
            "tan" => f64::tan,
            "cot" => |x| x.tan().recip(),
            "sec" => |x| x.cos().recip(),
            "csc" => |x| x.sin().recip(),
            "arcsin" => f64::asin,
            "arccos" => f64::acos,
            "arctan" => f64::atan,
            "log" => f64::log10,
            "ln" => f64::ln,
            "exp" => f64::exp,
            // Other words are Greek letters. Infinity has no value, so it is compared as text.
            "infty" => return None,
            _ if is_letter(name) => return Some(letter(name)),
            _ => return None,
        };
        // \sin^2 x
        let power = match self.take('^') {
            true => Some(self.argument()?),
            false => None,
        };
        let inner = self.power()?.map(function);
        Some(power.map_or(inner, |power| map2(inner, power, f64::powf)))
    }

    fn root(&mut self) -> Option<Points> {
        let index = match self.take('[') {
            true => self.group(']')?,
            false => [2.0; POINTS],
        };
        let inner = match self.take('(') {
            true => self.group(')')?,
            false => self.argument()?,
        };
        Some(map2(inner, index, |x, n| match n {
            2.0 => x.sqrt(),
            3.0 => x.cbrt(),
            n => x.powf(n.recip()),
        }))
    }
}

fn factorial(x: f64) -> f64 {
    match x.fract() == 0.0 && (0.0..=170.0).contains(&x) {
        true => std::iter::successors(Some(1.0), |i| Some(i + 1.0))
            .take_while(|i| *i <= x)
            .product(),
        false => f64::NAN,
    }
}

fn is_letter(name: &str) -> bool {
    let letters = [
        "alpha", "beta", "gamma", "delta", "theta", "lambda", "mu", "phi", "rho", "sigma", "omega",
        "tau", "epsilon",
    ];
    letters.contains(&name)
}

/// The values of a variable: numbers between 0.5 and 2.5 that depend on its name.
fn letter(name: &str) -> Points {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in name.bytes() {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    }
    [17, 34, 51].map(|turn| {
        let bits = hash.rotate_left(turn).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 11;
        0.5 + 2.0 * (bits as f64 / (1_u64 << 53) as f64)
    })
}
