// What an operator will return, before it has run.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <vector>

namespace sim {

// While it lives, operators do nothing but compute: no autograd, no autocast, no modes of Python.
struct Plain {
  c10::impl::ExcludeDispatchKeyGuard keys{
      c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset |
      c10::DispatchKeySet({c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::Python,
                           c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::Functionalize})};
};

// Applies `change` to every tensor of an argument.
template <typename Change>
c10::IValue mapped(const c10::IValue& value, const Change& change) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : value.toTensorVector()) list.push_back(t.defined() ? change(t) : t);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& t : value.toOptionalTensorVector())
      list.push_back(t && t->defined() ? std::optional<at::Tensor>(change(*t)) : t);
    return list;
  }
  return value;
}

// A number of Python is a tensor without dimensions whose dtype counts less than that of others: `made` of
// such a number is one too.
at::Tensor as_number(at::Tensor made, const at::Tensor& number);

struct Results {
  bool known = false;               // otherwise they depend on values
  std::vector<c10::IValue> values;  // on the meta device
};

// Shapes and dtypes of the results, from what the meta device says; it is asked once for equal arguments,
// since many of its answers are computed in Python.
Results results_of(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments);

}  // namespace sim
