// The Python type of `grad_fn` of what a node of ours made: as autograd's own, with properties of its own.
#pragma once

#include <torch/csrc/autograd/python_cpp_function.h>

#include <initializer_list>
#include <typeinfo>
#include <vector>

#include "python.h"

namespace mh::node {

// The node that Python sees.
template <class Node>
const Node& node_of(PyObject* self) {
  return static_cast<const Node&>(*reinterpret_cast<torch::autograd::THPCppFunction*>(self)->cdata);
}

template <class Node>
PyObject* get_call(PyObject* self, void*) {
  return py::reinterpret_borrow<py::object>(held(node_of<Node>(self).call)).release().ptr();
}

// One type a `Node`: called once. name: of the type; own: what Python asks of it besides its `call`.
template <class Node>
py::object function_type(const char* name, std::initializer_list<PyGetSetDef> own) {
  using namespace torch::autograd;  // whose functions the macro names
  static PyMethodDef methods[] = {
      {"_register_hook_dict", THPCppFunction_register_hook_dict, METH_O, nullptr},
      {"register_hook", THPCppFunction_register_hook, METH_O, nullptr},
      {"register_prehook", THPCppFunction_register_prehook, METH_O, nullptr},
      {"name", THPCppFunction_name, METH_NOARGS, nullptr},
      {"_sequence_nr", THPCppFunction_sequence_nr, METH_NOARGS, nullptr},
      {nullptr, nullptr, 0, nullptr},
  };
  static std::vector<PyGetSetDef> properties{THP_FUNCTION_DEFAULT_PROPERTIES};
  properties.insert(properties.end(), own);
  properties.push_back({"call", get_call<Node>, nullptr, nullptr, nullptr});
  properties.push_back({nullptr, nullptr, nullptr, nullptr, nullptr});
  static PyTypeObject type;
  _initFunctionPyTypeObject(type, name, properties.data(), methods);
  registerCppFunction(typeid(Node), &type);
  return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(&type));
}

}  // namespace mh::node
